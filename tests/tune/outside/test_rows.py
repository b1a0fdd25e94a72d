"""Rows of a profile, from steps written by hand."""

from dataclasses import replace

import pytest

from sarathi_tune.measure.profile import Sample
from sarathi_tune.measure.shapes import rounded_context
from sarathi_tune.tune.outside.rows import drift, profile_rows, repeat_noise, request_overhead_ms
from sarathi_tune.tune.outside.running import RunningBudget
from sarathi_tune.tune.outside.seen import Alone
from sarathi_tune.tune.outside.steps import Injection, Step, Timeline

CERTAIN = RunningBudget(104, (104, 104), is_bound=False, error=0.01, num_full=9, num_injections=9, miscounted=0.0)


def plain(name: str, decodes: int, context: float, *times_ms: float) -> Timeline:
    return Timeline(name, tuple(Step(0.0, time_ms, decodes, context) for time_ms in times_ms), ())


def injected(prompts: tuple[int, ...], *times_ms: float) -> Timeline:
    steps = tuple(Step(0.0, time_ms, 4, 64.0) for time_ms in times_ms)
    item = Injection("full", prompts, (len(steps) - 1,), steps, 20.0)
    return Timeline("full", (), (item,))


def by_shape(samples: tuple[Sample, ...]) -> dict[str, tuple[float, ...]]:
    return {str(sample.shape): sample.times_ms for sample in samples}


def test_the_full_batch_keeps_its_times_and_the_others_their_median() -> None:
    rows = profile_rows([plain("full", 32, 512.0, 70.0, 71.0, 90.0), plain("few", 4, 64.0, 14.0, 15.0, 22.0)], [], None)
    assert by_shape(rows) == {"32x512": (70.0, 71.0, 90.0), "4x64": (15.0,)}


def test_a_prompt_becomes_full_chunks_and_a_rest() -> None:
    """250 tokens beside 4 decodes at a budget of 104: chunks of 100, 100 and 50, and a step before them."""
    rows = profile_rows([injected((250,), 20.0, 60.0, 65.0, 40.0)], [], CERTAIN)
    assert by_shape(rows) == {"4x64+100@0": (60.0,), "4x64+100@100": (65.0,), "4x64+50@200": (40.0,)}


def test_a_rest_of_unknown_length_is_no_row() -> None:
    doubtful = RunningBudget(104, (100, 108), is_bound=False, error=0.01, num_full=9, num_injections=9, miscounted=0.0)
    rows = profile_rows([injected((250,), 20.0, 60.0, 65.0, 40.0)], [], doubtful)
    assert by_shape(rows) == {"4x64+100@0": (60.0,), "4x64+100@100": (65.0,)}


def test_scenes_with_as_many_short_streams_share_their_context() -> None:
    early, late = injected((50,), 20.0, 40.0), injected((50,), 20.0, 44.0)
    moved = tuple(replace(step, context=90.0) for step in late.injections[0].steps)
    lines = [
        replace(early, name="few"),
        replace(late, name="refine", injections=(replace(late.injections[0], steps=moved),)),
    ]
    # the median of 64, 64, 90 and 90
    assert by_shape(profile_rows(lines, [], CERTAIN)) == {f"4x{rounded_context(77.0)}+50@0": (42.0,)}


def test_prompts_at_once_and_prompts_in_too_few_steps_are_no_rows() -> None:
    assert profile_rows([injected((50, 50), 20.0, 60.0)], [], CERTAIN) == ()
    assert profile_rows([injected((950,), 20.0, 60.0)], [], CERTAIN) == ()


def test_prompts_alone_lose_what_a_request_costs_besides() -> None:
    alone = [Alone(1, 22.0), Alone(1, 24.0), Alone(64, 40.0), Alone(128, 70.0)]
    lines = [plain("one", 1, 64.0, 15.0, 16.0, 15.0)]
    assert request_overhead_ms(lines, alone) == 8.0
    rows = by_shape(profile_rows(lines, alone, CERTAIN))
    # 128 don't fit into a step of 104
    assert rows == {"1x64": (15.0,), "64@0": (32.0,)}


def test_without_a_single_stream_a_request_has_no_known_cost() -> None:
    assert request_overhead_ms([plain("few", 4, 64.0, 15.0)], [Alone(1, 22.0)]) is None


def test_the_same_step_is_set_against_itself() -> None:
    calm = plain("full", 8, 64.0, *([20.0] * 40))
    assert repeat_noise(calm) == 0
    # five of one kind and five of another, in turns
    restless = plain("full", 8, 64.0, *([20.0] * 5 + [30.0] * 5) * 4)
    assert repeat_noise(restless) == pytest.approx(0.4)
    assert repeat_noise(plain("full", 8, 64.0, *([20.0] * 10))) is None


def test_a_machine_that_became_slower_is_seen_between_two_scenes() -> None:
    before, after = plain("full", 8, 64.0, *([20.0] * 9)), plain("full", 8, 64.0, *([26.0] * 9))
    assert drift([before, after]) == pytest.approx(0.3)
    assert drift([before, plain("full", 7, 64.0, *([26.0] * 9))]) is None
    assert drift([before, plain("full", 8, 64.0, 26.0)]) is None, "one step is no median"
    assert drift([before]) is None
    assert drift([]) is None
