"""The running budget, from stamps of an engine whose budget is known."""

import pytest

from sarathi_tune.tune.outside.plan import ladder, refining_prompts
from sarathi_tune.tune.outside.running import chunks_of, infer_budget, roundest
from sarathi_tune.tune.outside.steps import Injection, Step, timeline
from tests.profiles import Truth, cpu_like, gpu_like
from tests.tune.outside.virtual import VirtualServer


def injections(budget: int, longest: int, decodes: int = 4, **server: object) -> tuple[Injection, ...]:
    virtual = VirtualServer(budget, **server)  # type: ignore[arg-type]
    return timeline(virtual.play(decodes, [(length,) for length in ladder(longest)])).injections


@pytest.mark.parametrize("budget", [64, 128, 197, 256, 512, 1000, 2048, 3001])
@pytest.mark.parametrize("truth", [cpu_like, gpu_like])
def test_a_ladder_of_prompts_shows_the_budget(budget: int, truth: Truth) -> None:
    found = infer_budget(injections(budget, 8000, truth=truth, seed=budget))
    assert found is not None
    assert not found.is_bound
    assert found.budget == pytest.approx(budget, rel=0.05)
    low, high = found.interval
    assert high is not None
    assert low - 2 <= budget <= high + 2
    assert found.miscounted == 0


@pytest.mark.parametrize("budget", [128, 512, 2048])
def test_noise_and_spikes_leave_it_within_the_promise(budget: int) -> None:
    found = infer_budget(injections(budget, 8000, noise=0.08, jitter_ms=2.0, spike_every=25, seed=3))
    assert found is not None
    assert found.budget == pytest.approx(budget, rel=0.15)


def test_many_decodes_leave_less_for_prompts() -> None:
    found = infer_budget(injections(256, 4000, decodes=48, truth=gpu_like))
    assert found is not None
    assert found.budget == pytest.approx(256, rel=0.05)


def test_a_budget_that_no_prompt_fills_is_bounded() -> None:
    found = infer_budget(injections(8192, 1000))
    assert found is not None
    assert found.is_bound
    assert found.interval == (found.budget, None)
    # all 1000 were computed beside 4 decodes in one step; a rest of a few tokens can't be told from none
    assert 0.9 * 1004 <= found.budget <= 1004


def test_prompts_at_once_reach_a_budget_beyond_the_longest_prompt() -> None:
    virtual = VirtualServer(3000)
    alone = virtual.play(4, [(length,) for length in ladder(1000)])
    bound = infer_budget(timeline(alone).injections)
    assert bound is not None
    assert bound.is_bound
    together = refining_prompts(bound, 4, 1000)
    assert max(sum(lengths) for lengths in together) >= 2000
    more = virtual.play(4, [(1000,) * 4, (1000,) * 3, (900,) * 5])
    found = infer_budget([*timeline(alone).injections, *timeline(more).injections])
    assert found is not None
    assert not found.is_bound
    assert found.budget == pytest.approx(3000, rel=0.05)


def test_refining_narrows_the_interval() -> None:
    virtual = VirtualServer(1536, noise=0.06, seed=5)
    rough = timeline(virtual.play(4, [(length,) for length in ladder(3000)])).injections
    first = infer_budget(rough)
    assert first is not None
    more = timeline(virtual.play(4, refining_prompts(first, 4, 6000))).injections
    second = infer_budget([*rough, *more])
    assert second is not None
    assert second.interval[1] is not None
    assert second.budget == pytest.approx(1536, rel=0.05)
    assert second.interval[1] - second.interval[0] <= 0.05 * 1536


def test_steps_that_no_budget_explains() -> None:
    """Prompts of 1,000 tokens that sometimes take one step and sometimes eight."""
    whole = infer_budget(injections(4096, 1000, seed=1))
    assert whole is not None
    mixed = infer_budget([*injections(4096, 1000, seed=1), *injections(128, 1000, seed=2)])
    assert mixed is not None
    assert mixed.miscounted > 0.1 or mixed.error > 3 * whole.error


def test_nothing_to_explain() -> None:
    assert infer_budget([]) is None


def test_prompts_are_cut_first_come_first_served() -> None:
    assert chunks_of([5], 10) == [((0, 5),)]
    assert chunks_of([25], 10) == [((0, 10),), ((10, 10),), ((20, 5),)]
    assert chunks_of([6, 6, 6], 10) == [((0, 6), (0, 4)), ((4, 2), (0, 6))]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (2030, 2050, 2048),
        (508, 512, 512),
        (127, 128, 128),
        (197, 197, 197),
        (190, 194, 192),
        (589, 608, 600),
        (1990, 2015, 2000),
    ],
)
def test_the_roundest_of_equals(low: int, high: int, expected: int) -> None:
    assert roundest(range(low, high + 1)) == expected


def test_a_chunk_of_one_step_by_hand() -> None:
    """Decode steps of 10 ms, 1 ms per token: 100 tokens in steps of 64 and 36 beside one decode, a budget of 65."""
    cuts = {100: (64, 36), 50: (50,), 30: (30,), 192: (64, 64, 64), 200: (64, 64, 64, 8), 10: (10,)}
    items = [
        Injection(
            scene="hand",
            prompts=(tokens,),
            answered_at=(len(cut),),
            steps=tuple(Step(0.0, 10.0 + extra, 1, 100.0) for extra in (0, *cut)),
            plain_ms=10.0,
        )
        for tokens, cut in cuts.items()
    ]
    found = infer_budget(items)
    assert found is not None
    assert found.budget in (65, 66), "64 would have cut 192 into four steps"
    assert found.interval[0] <= 65 <= (found.interval[1] or 0)


def test_a_rounder_budget_that_would_cut_prompts_otherwise_is_not_chosen() -> None:
    """Decode steps of 10 ms and 0.25 ms per token, a budget of 604 beside 4 decodes. A prompt of 602 took a full step
    and one of 2 tokens, which 608 would have taken in one; 600 and 605 would cut one of the others otherwise."""
    cuts = {602: (600, 2), 600: (600,), 1800: (600, 600, 600), 300: (300,), 100: (100,), 30: (30,), 900: (600, 300)}
    items = [
        Injection(
            scene="hand",
            prompts=(tokens,),
            answered_at=(len(cut),),
            steps=tuple(Step(0.0, 10.0 + 0.25 * extra, 4, 100.0) for extra in (0, *cut)),
            plain_ms=10.0,
        )
        for tokens, cut in cuts.items()
    ]
    found = infer_budget(items)
    assert found is not None
    low, high = found.interval
    assert low <= 600
    assert high is not None
    assert high >= 608, "the interval still says how far a smooth price of tokens can tell"
    assert found.budget in (604, 605)
    assert found.miscounted == 0
