"""`sarathi-tune profile --shapes FILE`: time exactly these steps, and nothing else."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sarathi_tune.cli import options as flags
from sarathi_tune.cli.consoles import data_console
from sarathi_tune.cli.edge import edge
from sarathi_tune.cli.output import STDOUT, check_target, emit_document
from sarathi_tune.config.run import DEFAULT_MODEL, DeviceConfig
from sarathi_tune.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from sarathi_tune.measure.profile import Profile
    from sarathi_tune.measure.rounds import Progress
    from sarathi_tune.measure.shapes import Shape
    from sarathi_tune.report.progress import Phase, Ui

DEFAULT_REPEATS = 20


@edge
def profile(
    shapes: Annotated[
        str | None,
        typer.Option("--shapes", metavar="FILE|LIST", help="A JSON file, or shapes like 8x1024,512@0,8x1024+504@0."),
    ] = None,
    repeats: Annotated[
        str | None,
        typer.Option("--repeats", metavar="N", help=f"Timed steps per shape. (default: {DEFAULT_REPEATS})"),
    ] = None,
    model: flags.Model = None,
    device: flags.Device = None,
    attention: flags.Attention = None,
    dtype: flags.Dtype = None,
    threads: flags.Threads = None,
    seed: flags.Seed = None,
    json_target: flags.JsonTarget = None,
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="Keep the profile document there.")] = None,
    quiet: flags.Quiet = False,
) -> ExitCode:
    """Time exactly the shapes listed, interleaved, and print median and p99 milliseconds per shape."""
    steps = flags.parse_device(device, attention, dtype, threads)
    count = flags.parse_count(repeats, "--repeats") or DEFAULT_REPEATS
    wanted = _shapes(shapes)
    draws = flags.parse_count(seed, "--seed", smallest=0) or 0
    check_target(json_target)
    check_target(out)
    from sarathi_tune.cli.ui import make_ui
    from sarathi_tune.measure.profile import profile_as_dict
    from sarathi_tune.measure.samples import summarise

    measured = _measure(model or DEFAULT_MODEL, wanted, count, steps, draws, make_ui(quiet=quiet))
    timings = summarise(measured.samples)
    document = profile_as_dict(measured) | {"summary": [timing.as_dict() for timing in timings]}
    emit_document(document, json_target)
    emit_document(document, out)
    if json_target != STDOUT:
        from sarathi_tune.report.timings import print_timings

        print_timings(timings, measured.notices, data_console())
    return ExitCode.MET if any(timing.num_steps for timing in timings) else ExitCode.OUT_OF_MEMORY


def _shapes(text: str | None) -> tuple["Shape", ...]:
    """The shapes of a file, or of a list in the notation of the tables."""
    from sarathi_tune.measure.shapes import load_shapes, parse_shape

    if text is None:
        raise UsageError(
            "The shapes are missing: give --shapes FILE, or a list as in --shapes 8x1024,512@0,8x1024+504@0."
        )
    if text.endswith(".json") or Path(text).exists():
        return load_shapes(Path(text))
    return tuple(dict.fromkeys(map(parse_shape, text.split(","))))


def _measure(
    model: str, shapes: tuple["Shape", ...], repeats: int, steps: DeviceConfig, seed: int, ui: "Ui"
) -> "Profile":
    """Build the runner with as many pages as the largest shape needs, and time the shapes."""
    from sarathi_tune.config.presets import resolve_model
    from sarathi_tune.machine.conditions import ConditionsProbe
    from sarathi_tune.machine.description import describe_machine
    from sarathi_tune.measure.bench import Bench
    from sarathi_tune.measure.design import design_for_shapes
    from sarathi_tune.measure.profile import Profile
    from sarathi_tune.measure.rounds import measure_all

    source = resolve_model(model)
    longest = max(max(shape.context, shape.prefix + shape.chunk) for shape in shapes)
    if longest > source.config.max_model_len:
        raise UsageError(
            f"A shape needs {longest:,} tokens of context and {source.config.name} has "
            f"{source.config.max_model_len:,}: choose smaller shapes or another model."
        )
    with ui.phase("load model"):
        gpu, notices, runner = _runner(source, shapes, steps, seed)
        bench = Bench.build(runner, vocab_size=source.config.vocab_size, seed=seed)
    design = design_for_shapes(shapes, repeats, seed)
    with ui.phase("measure", total=len(shapes) * (repeats + 1)) as phase:
        measurement = measure_all(bench, design, probe=ConditionsProbe(gpu=gpu), progress=_teller(phase))
    machine = describe_machine(gpu)
    return Profile(
        samples=measurement.samples,
        machine=machine.as_dict(),
        model={
            "name": source.config.name,
            "dtype": runner.description["dtype"],
            "weights": runner.description["weights"],
        },
        engine=dict(runner.description),
        conditions=measurement.conditions,
        notices=tuple(notice.as_dict() for notice in (*notices, *measurement.notices)),
        noise=measurement.noise,
        max_model_len=source.config.max_model_len,
        source="sarathi-tune profile",
        created=_now(),
    )


def _runner(source: Any, shapes: tuple["Shape", ...], steps: DeviceConfig, seed: int) -> tuple[Any, Any, Any]:
    """The GPU if steps run on one, what there is to say about it and the threads, and the runner."""
    import torch

    from sarathi_tune.machine.conditions import thread_notices
    from sarathi_tune.machine.cpu import describe_cpu
    from sarathi_tune.machine.gpu import open_gpu
    from sarathi_tune.runtime.runner import Runner

    cpu = describe_cpu()
    threads = steps.threads or cpu.threads
    torch.set_num_threads(threads)
    runner = Runner.build(
        source,
        num_pages=max(shape.num_pages(steps.page_tokens) for shape in shapes),
        page_tokens=steps.page_tokens,
        device=steps.device,
        dtype=steps.dtype,
        attention=steps.attention,
        seed=seed,
    )
    gpu, notices = open_gpu() if runner.description["device"].startswith("cuda") else (None, ())
    return gpu, (*notices, *thread_notices(threads, len(cpu.cores), cpu.quota)), runner


def _teller(phase: "Phase") -> Any:
    def tell(progress: "Progress") -> None:
        phase.describe(str(progress.shape))
        phase.advance()

    return tell


def _now() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).isoformat(timespec="seconds")
