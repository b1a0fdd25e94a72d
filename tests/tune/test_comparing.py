"""`compare` under the virtual clock: the order of the schedulers that the paper reports (OSDI 2024, section 3),
and a small real run."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from sarathi_tune.config.compare import CompareConfig, SteadyConfig
from sarathi_tune.config.run import DeviceConfig, SchedulingConfig
from sarathi_tune.engine.plan import StepShape
from sarathi_tune.errors import InfeasibleError, UsageError
from sarathi_tune.loadgen.record import LoadResult, RequestRecord, StepRecord
from sarathi_tune.measure.profile import save_profile
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.report.compared import print_comparison
from sarathi_tune.report.comparison import BudgetedStep, Comparison, Outcome
from sarathi_tune.report.progress import SilentUi
from sarathi_tune.tune.comparing import check_compare, run_compare
from sarathi_tune.tune.comparing.basis import SCATTER_ROW_STEPS, scatter_rows
from sarathi_tune.tune.comparing.load import Load
from sarathi_tune.tune.comparing.outcome import outcome
from tests.hf_models import tiny_reference
from tests.profiles import cpu_like, measured

SMALL = SteadyConfig(streams=4, prompt_tokens=1000, num_prompts=2)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "profile.json"
    save_profile(measured(cpu_like, 0.01, 5, 0), path)
    return path


@pytest.fixture(scope="module")
def compared(profile: Path) -> Comparison:
    return run_compare(CompareConfig(virtual_profile=profile, budget_tokens=128, slo_itl_ms=40.0), SilentUi())


def figures(comparison: Comparison, scheduler: str) -> Outcome:
    contender = comparison.find(scheduler)
    assert contender is not None
    return contender.outcome


def test_everybody_serves_the_same_requests_to_their_end(compared: Comparison) -> None:
    assert [contender.scheduler for contender in compared.contenders] == [
        "sarathi",
        "sarathi-single",
        "prefill-first",
        "decode-first",
        "orca",
    ]
    outcomes = [contender.outcome for contender in compared.contenders]
    assert {(o.requests, o.finished, o.gaps, o.prompt_tokens) for o in outcomes} == {
        (12, 12, outcomes[0].gaps, 8 * 64 + 4 * 2000)
    }


def test_sarathi_stays_within_one_budgeted_step_and_prefill_first_stalls_for_a_whole_prompt(
    compared: Comparison,
) -> None:
    sarathi, prefill_first = figures(compared, "sarathi"), figures(compared, "prefill-first")
    assert sarathi.largest_gap_units is not None
    assert sarathi.largest_gap_units <= 1.05
    assert sarathi.largest_gap_p99_units is not None
    assert sarathi.largest_gap_p99_units <= 1.0
    assert sarathi.largest_gap_steps == 1
    assert prefill_first.largest_gap_units is not None
    assert prefill_first.largest_gap_units >= 5
    assert prefill_first.largest_gap_steps == 2, "the step of the prompt, and the decode behind it"
    # the profile's own truth: a prompt of 2,000 tokens and a decode step
    assert prefill_first.itl_max_ms is not None
    assert prefill_first.itl_max_ms == pytest.approx(9 + 0.11 * 1976 + 3e-6 * 2000 * 1000 + 10, rel=0.1)


def test_decode_first_has_the_smoothest_gaps_and_the_worst_wait(compared: Comparison) -> None:
    waits = {c.scheduler: c.outcome.ttft_p99_ms or 0.0 for c in compared.contenders}
    assert max(waits, key=waits.__getitem__) == "decode-first"
    assert figures(compared, "decode-first").gaps_over_slo == 0


def test_no_prompt_arrives_near_the_end_of_a_batch_that_takes_none(compared: Comparison) -> None:
    """Before the end of `decode-first`'s batch or behind it: not a matter of a few percent of speed."""
    answer, arrivals = compared.load["answer_tokens"], compared.arrivals_s
    assert compared.budgeted_step.decodes == 8
    start_ms = cpu_like(Shape(0, 0, 8 * 64, 0))
    end_s = (start_ms + sum(cpu_like(Shape(8, 64 + token)) for token in range(1, answer))) / 1e3
    nearest_s = min(abs(end_s - arrival_s) for arrival_s in arrivals)
    assert nearest_s > 0.2 * compared.load["every_s"]


def test_orca_does_not_pause_decodes_but_its_step_is_as_long_as_the_prompt(compared: Comparison) -> None:
    orca = figures(compared, "orca")
    assert orca.largest_gap_steps == 1
    assert orca.largest_gap_units is not None
    assert orca.largest_gap_units >= 5


def test_capacity_is_largest_where_prompts_are_chunked(compared: Comparison) -> None:
    capacity = {c.scheduler: c.capacity_per_s or 0.0 for c in compared.contenders}
    assert capacity["sarathi"] > 1.5 * capacity["prefill-first"]
    assert capacity["sarathi"] > 1.5 * capacity["orca"]
    assert capacity["decode-first"] == 0.0, "whoever arrives waits for the answers to end"


def test_the_budgeted_step_is_the_costliest_that_the_load_can_have(compared: Comparison) -> None:
    step, answer = compared.budgeted_step, compared.load["answer_tokens"]
    assert (step.decodes, step.context) == (8, 64 + answer), "all answers at their ends"
    assert (step.chunk, step.prefix) == (120, 2000 - 120), "the last chunk of a prompt"
    truth = cpu_like(Shape(8, step.context, step.chunk, step.prefix))
    assert step.p50_ms == pytest.approx(truth, rel=0.03)


def test_the_budget_follows_from_the_objective(profile: Path) -> None:
    config = CompareConfig(virtual_profile=profile, slo_itl_ms=30.0, steady=SMALL, schedulers=("sarathi",))
    comparison = run_compare(config, SilentUi())
    assert comparison.budgeted_step.p99_ms == pytest.approx(30.0, rel=0.1)
    longest = figures(comparison, "sarathi").itl_max_ms
    assert longest is not None
    assert longest <= 31.0


def test_a_shared_prefix_is_computed_once_with_the_cache_on(profile: Path) -> None:
    def served(prefix_cache: bool) -> Outcome:
        config = CompareConfig(
            virtual_profile=profile,
            budget_tokens=256,
            slo_itl_ms=60.0,
            workload="agentic",
            rate_per_s=1.0,
            num_requests=48,
            schedulers=("sarathi",),
            scheduling=SchedulingConfig(prefix_cache=prefix_cache),
        )
        return figures(run_compare(config, SilentUi()), "sarathi")

    warm, cold = served(True), served(False)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens > 0.75 * warm.prompt_tokens
    assert (warm.ttft_p50_ms or 0.0) < 0.5 * (cold.ttft_p50_ms or 0.0)


def test_preemptions_are_counted_when_the_cache_is_small(profile: Path) -> None:
    config = CompareConfig(
        virtual_profile=profile,
        budget_tokens=256,
        slo_itl_ms=60.0,
        workload="fixed:100:200",
        rate_per_s=20.0,
        num_requests=12,
        max_num_seqs=8,
        kv_tokens=800,
        schedulers=("sarathi",),
    )
    seen = figures(run_compare(config, SilentUi()), "sarathi")
    assert seen.finished == 12
    assert seen.preemptions > 0


def test_what_cannot_be_compared_is_refused(profile: Path) -> None:
    with pytest.raises(UsageError, match="leaves no token"):
        check_compare(CompareConfig(virtual_profile=profile, budget_tokens=8))
    with pytest.raises(UsageError, match="no room for an answer"):
        check_compare(CompareConfig(virtual_profile=profile, steady=SteadyConfig(prompt_tokens=9000)))
    with pytest.raises(InfeasibleError, match="give --budget"):
        run_compare(CompareConfig(virtual_profile=profile, slo_itl_ms=5.0), SilentUi())


def test_steps_of_the_answers_alone_become_rows_of_a_profile() -> None:
    """41 steps of two answers: the first with their prompts, then 40 that make two rows; a lone step behind them."""
    shapes = [StepShape((), ((0, 64), (0, 64))), *(StepShape((65 + i, 65 + i)) for i in range(41)), StepShape((106,))]
    steps = tuple(StepRecord(i / 100, i / 100 + 0.008 + i / 1e5, shape, 0, 2, 0) for i, shape in enumerate(shapes))
    rows = scatter_rows(LoadResult((), steps, (0.0, 1.0), 1.0), 2)
    assert [str(row.shape) for row in rows] == ["2x74", "2x94"]
    assert [len(row.times_ms) for row in rows] == [SCATTER_ROW_STEPS] * 2
    assert rows[0].times_ms == pytest.approx([8.0 + i / 100 for i in range(1, 21)])


def test_figures_by_hand() -> None:
    """Three steps: a chunk beside a decode (30 ms), a chunk alone (100 ms), a decode (10 ms)."""
    steps = tuple(
        StepRecord(start, end, shape, 0, 2, 0)
        for start, end, shape in (
            (0.0, 0.01, StepShape((), ((0, 4),))),
            (0.01, 0.04, StepShape((5,), ((0, 10),))),
            (0.04, 0.14, StepShape((), ((10, 50),))),
            (0.14, 0.15, StepShape((6,))),
        )
    )
    answer = RequestRecord(
        7, 0.0, 4, 3, "finished", token_s=(0.01, 0.04, 0.15), stalled=(True, True), output_got=3, num_preemptions=1
    )
    prompt = RequestRecord(1, 0.02, 60, 1, "finished", token_s=(0.14,), stalled=(), output_got=1, cached_tokens=16)
    result = LoadResult((answer, prompt), steps, (0.0, 0.15), 0.15)
    seen = outcome(result, Load((), frozenset({1})), slo_ms=50.0, budgeted=BudgetedStep(1, 6, 50, 10, 55.0, 88.0))
    assert seen.ttft_p50_ms == pytest.approx(120.0), "only the judged request's"
    assert (seen.gaps, seen.stalled_gaps, seen.gaps_over_slo) == (2, 2, 1)
    assert seen.itl_max_ms == pytest.approx(110.0)
    assert seen.largest_gap_steps == 2
    assert seen.largest_gap_units == pytest.approx(2.0)
    assert seen.largest_gap_p99_units == pytest.approx(1.25)
    assert seen.output_tokens_per_s == pytest.approx(4 / 0.15)
    assert (seen.preemptions, seen.cached_tokens, seen.prompt_tokens) == (1, 16, 64)
    assert seen.trace == ((0.04, 30.0), (0.15, 110.0))


def test_of_several_real_runs_the_one_with_the_middle_longest_gap_is_shown(tmp_path: Path) -> None:
    tiny_reference(tmp_path, "llama")
    steady = SteadyConfig(streams=2, prompt_tokens=40, every_s=0.05, num_prompts=2)
    config = CompareConfig(
        model=str(tmp_path),
        device=DeviceConfig(device="cpu", dtype="float32", threads=1),
        steady=steady,
        slo_itl_ms=50.0,
        budget_tokens=16,
        schedulers=("sarathi", "orca"),
        num_plays=3,
    )
    comparison = run_compare(config, SilentUi())
    for contender in comparison.contenders:
        assert contender.measured is not None
        longest = [gap for gap in contender.longest_gaps_ms if gap is not None]
        assert len(longest) == 3
        assert contender.measured.itl_max_ms == sorted(longest)[1]
        step, modelled = contender.budgeted_step, comparison.budgeted_step
        assert step is not None
        assert step.p50_ms != modelled.p50_ms, "timed, not modelled"
        assert step.p99_ms / step.p50_ms == pytest.approx(modelled.p99_ms / modelled.p50_ms)
        assert contender.measured.largest_gap_units == pytest.approx(contender.measured.itl_max_ms / step.p50_ms)
        assert contender.measured.largest_gap_p99_units == pytest.approx(contender.measured.itl_max_ms / step.p99_ms)
    console = Console(width=80, file=io.StringIO())
    print_comparison(comparison, console)
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "Each scheduler ran 3 times, in turn; shown is its run with the middle longest gap." in text
