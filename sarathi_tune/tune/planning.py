"""What a run would do, for `--dry-run`: nothing is measured, nothing is written, no weight is loaded."""

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.config.run import TuneConfig
from sarathi_tune.machine.memory import describe_memory
from sarathi_tune.measure.design import Design, RoughCost, plan_design
from sarathi_tune.report.plan import PlannedPhase, RunPlan
from sarathi_tune.tune.folder import JOURNAL, PROFILE, RESULT
from sarathi_tune.tune.measuring import design_space
from sarathi_tune.tune.settings import DeviceType, Settings

#: (FLOP/s, bytes/s) of an ordinary device of each kind: only good enough to say which shapes and how long. A real run
#: probes the device first.
_ORDINARY: dict[DeviceType, tuple[float, float]] = {"cpu": (5e11, 2e10), "cuda": (3e14, 2e12)}
_LOAD_S: dict[DeviceType, float] = {"cpu": 8.0, "cuda": 20.0}
_PREDICT_S = 8.0


def rough_cost(config: ModelConfig, device: DeviceType) -> RoughCost:
    """What steps would cost on an ordinary device: weights streamed, or 2 FLOP per weight and token."""
    flops, bandwidth = _ORDINARY[device]
    stream_ms = config.weight_bytes / bandwidth * 1e3
    knots = tuple((n, max(stream_ms, 2e3 * config.num_parameters * n / flops)) for n in (1, 256, 2048))
    return RoughCost(knots, decode_key_ms=config.kv_bytes_per_token / bandwidth * 1e3)


def plan(config: TuneConfig, settings: Settings, device: DeviceType, measure_s: float) -> RunPlan:
    """The plan of a run with these settings."""
    design: Design = plan_design(
        design_space(config, settings, measure_s), rough_cost(settings.source.config, device), config.seed
    )
    left_s = max(0.0, config.time_limit_s - measure_s - _LOAD_S[device] - _PREDICT_S)
    phases = [
        PlannedPhase("prepare", "load the model", _LOAD_S[device]),
        PlannedPhase("measure", f"{len(design.points)} shapes, at least {design.min_rounds} rounds", measure_s),
        PlannedPhase("derive", "fit the step model, derive the budget", 1.0),
        PlannedPhase("predict", "goodput over budget and rate on the virtual clock", _PREDICT_S),
    ]
    if config.verify:
        phases.append(
            PlannedPhase("verify", f"the recommended budget and {settings.control_budget:,} for real", left_s)
        )
    folder = f"{config.out_dir}/<time>-{settings.source.config.name}"
    return RunPlan(
        phases=tuple(phases),
        settings={
            name: f"{value:,} ({settings.origins[name]})" if name in settings.origins else value
            for name, value in settings.as_dict().items()
        },
        shapes=tuple(str(point.shape) for point in design.points if point.label == "a"),
        weight_bytes=settings.source.config.weight_bytes,
        kv_bytes=settings.num_pages * config.device.page_tokens * settings.source.config.kv_bytes_per_token,
        free_bytes=describe_memory().available_bytes if device == "cpu" else None,
        writes=tuple(f"{folder}/{name}" for name in (JOURNAL, PROFILE, RESULT)),
    )
