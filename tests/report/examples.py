"""Results built by hand, one per verdict, with figures that a person can check."""

from sarathi_tune.report.result import (
    Advice,
    Capacity,
    CurvePoint,
    FitError,
    Latency,
    LimitingStep,
    Neighbour,
    Objective,
    PhaseTime,
    Result,
    RuleOfThumb,
    Run,
)

CURVE = (
    CurvePoint(64, 32.0, 35.0),
    CurvePoint(128, 44.0, 48.0),
    CurvePoint(256, 68.5, 74.6),
    CurvePoint(352, 88.0, 97.1),
    CurvePoint(512, 120.0, 131.0),
    CurvePoint(1024, 226.0, 244.0),
    CurvePoint(2048, 470.0, 505.0),
)

NEIGHBOURS = (
    Neighbour(176, 61.0, True, "half", 1024, 380.0, 0.52, 402.0, 1310.0, 0.51),
    Neighbour(352, 97.1, True, "recommended", 1024, 290.0, 0.52, 310.0, 1044.0, 0.51),
    Neighbour(704, 173.0, False, "double", 1024, 260.0, 0.52, 288.0, 951.0, 0.12),
    Neighbour(2048, 505.0, False, "engine default", 1024, 240.0, 0.52, 251.0, 12_310.0, 0.0),
)


def recommended(*, verified: bool = True, met: bool = True) -> Result:
    """A budget that was derived, and verified unless told otherwise."""
    return Result(
        objective=Objective(itl_ms=100.0),
        advice=Advice(
            verdict="recommended",
            why="The largest budget whose step with 8 decodes at 1,024 tokens of context beside a chunk of 344 at "
            "prefix 2,048 stays within 100 ms at p99: 97.1 ms.",
            max_num_seqs=8,
            budget_tokens=352,
            interval_tokens=(336, 368),
            limiting=LimitingStep(8, 1024, 344, 2048, 88.0, 97.1),
            rule_of_thumb=RuleOfThumb(21.3, "measured, 8x1024", 0.192, "measured, 98.3 ms / 512 tokens", 111, 0.12, 9),
            curve=CURVE,
            neighbours=NEIGHBOURS,
        ),
        fit_error=FitError("held-out", 0.031, 0.082, 14, 0.034, 0.085, 0.14, 0.12),
        capacities=(Capacity(352, 0.58), Capacity(2048, 0.0)),
        runs=_runs(met) if verified else (),
        notices=(
            {
                "code": "machine-busy",
                "severity": "warning",
                "cause": "The machine was busy while measuring: load average 3.1 on 2 cores.",
                "remedy": "Stop the other work and measure again; step times on a shared machine are too long.",
            },
        ),
        machine={"name": "2 cores of an Intel Xeon with AMX", "threads": 2},
        model={"name": "smollm2-135m", "dtype": "bfloat16", "weights": "random"},
        engine={"name": "sarathi-tune 0.1.0", "attention": "cpu-grouped"},
        workload={
            "name": "conversation",
            "prompt_tokens": {"p50": 1020, "p90": 1924, "p99": 3229},
            "output_tokens": {"p50": 129, "p90": 458, "p99": 1286},
        },
        settings={
            "max_num_seqs": 8,
            "context": 1024,
            "prefix": 2048,
            "origins": {"max_num_seqs": "default on cpu", "context": "given"},
        },
        phases=(PhaseTime("measure", 62.0), PhaseTime("verify", 58.4)),
        versions={"python": "3.11.7", "torch": "2.13.0"},
        seed=0,
        command="sarathi-tune --slo-itl 100ms",
        created="2026-01-01T00:00:00Z",
        profile="profile.json",
    )


def _runs(met: bool) -> tuple[Run, ...]:
    measured_ms = 98.3 if met else 112.0
    return (
        Run(
            "recommended",
            352,
            0.52,
            Latency(60, 4310, 24.0, 97.1, None, 99.0, 101.0, 97.0, 99.5, 0.12, 310.0, 1044.0, 0.51),
            Latency(
                60, 4310, 24.6, measured_ms, (96.0, 101.0), 103.0, 106.0, 99.0, 101.5, 0.124, 322.0, 1102.0, 0.49, 0.95
            ),
            meets_slo=met,
            misses=() if met else ("p99 ITL 112 ms > 100 ms",),
            duration_s=115.0,
        ),
        Run(
            "control",
            2048,
            0.52,
            Latency(60, 4310, 24.0, 505.0, None, 510.0, 515.0, 505.0, 507.0, 0.031, 251.0, 12_310.0, 0.0),
            Latency(60, 4290, 24.6, 512.0, (490.0, 530.0), 540.0, 541.0, 511.0, 520.0, 0.03, 260.0, 12_900.0, 0.0, 0.0),
            meets_slo=False,
            duration_s=117.0,
        ),
        Run(
            "neighbour",
            256,
            0.52,
            Latency(60, 4310, 24.0, 74.6, ttft_p99_ms=1310.0, goodput_per_s=0.51),
            Latency(60, 120, 24.6, 75.0, ttft_p99_ms=1300.0, goodput_per_s=0.5),
            problems=("only 120 gaps, and a p99 needs 299.",),
        ),
    )


def infeasible() -> Result:
    """The decodes alone break the objective."""
    return Result(
        objective=Objective(itl_ms=20.0),
        advice=Advice(
            verdict="infeasible",
            why="A step of 16 decodes at 1,024 tokens of context is slower than the SLO before any prefill is added.",
            max_num_seqs=16,
            decode_step=LimitingStep(16, 1024, 0, 0, 20.1, 20.6),
            limiting=LimitingStep(16, 1024, 16, 0, 21.9, 22.4),
            rule_of_thumb=RuleOfThumb(20.1, "measured, 16x1024", 0.0933, "measured, 95.5 ms / 1,024 tokens", 215),
            largest_batch=13,
            smallest_slo_ms=22.4,
        ),
        model={"name": "llama-3.1-8b"},
    )


def not_binding() -> Result:
    """Every step is faster than the objective."""
    return Result(
        objective=Objective(itl_ms=5000.0),
        advice=Advice(
            verdict="not-binding",
            why="The longest prompt that the model takes, 8,192 tokens in one step, needs 1.9 s.",
            max_num_seqs=8,
            budget_tokens=8192,
            curve=CURVE,
        ),
        model={"name": "smollm2-135m"},
    )


def not_the_budget() -> Result:
    """The fixed part of a hybrid step breaks the objective."""
    return Result(
        objective=Objective(itl_ms=50.0),
        advice=Advice(
            verdict="not-the-budget",
            why="A hybrid step takes 199 ms with a chunk of one tile, 14 times the decode step: it leaves CUDA graphs.",
            max_num_seqs=32,
            smallest_slo_ms=205.0,
        ),
        model={"name": "glm"},
    )


def inconclusive() -> Result:
    """Too noisy to say."""
    return Result(
        objective=Objective(itl_ms=100.0),
        advice=Advice(
            verdict="inconclusive",
            why="Two measurements of the same step differ by 31 %, so the interval spans 90 to 900 tokens.",
            max_num_seqs=8,
            interval_tokens=(90, 900),
        ),
        model={"name": "smollm2-135m"},
    )
