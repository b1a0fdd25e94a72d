"""`sarathi-tune profile --shapes FILE`: time exactly these steps, and nothing else."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sarathi_tune.cli import options as flags
from sarathi_tune.cli.consoles import data_console
from sarathi_tune.cli.edge import edge
from sarathi_tune.cli.output import STDOUT, check_target, emit_document
from sarathi_tune.config.run import DEFAULT_MODEL
from sarathi_tune.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from sarathi_tune.measure.shapes import Shape

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
    tensor_parallel: flags.TensorParallel = None,
    pipeline_parallel: flags.PipelineParallel = None,
    seed: flags.Seed = None,
    json_target: flags.JsonTarget = None,
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="Keep the profile document there.")] = None,
    quiet: flags.Quiet = False,
) -> ExitCode:
    """Time exactly the shapes listed, interleaved, and print median and p99 milliseconds per shape."""
    steps = flags.parse_device(device, attention, dtype, threads, (tensor_parallel, pipeline_parallel))
    count = flags.parse_count(repeats, "--repeats") or DEFAULT_REPEATS
    wanted = _shapes(shapes)
    draws = flags.parse_seed(seed) or 0
    check_target(json_target)
    check_target(out)
    from sarathi_tune.cli.ui import make_ui
    from sarathi_tune.config.presets import resolve_model
    from sarathi_tune.measure.profile import profile_as_dict
    from sarathi_tune.measure.samples import summarise
    from sarathi_tune.tune.measuring import time_shapes

    source = resolve_model(model or DEFAULT_MODEL)
    measured = time_shapes(source, wanted, repeats=count, steps=steps, seed=draws, ui=make_ui(quiet=quiet))
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
    if text.endswith(".json") or _is_there(text):
        return load_shapes(Path(text))
    return tuple(dict.fromkeys(map(parse_shape, text.split(","))))


def _is_there(text: str) -> bool:
    try:
        return bool(text.strip()) and Path(text).exists()
    except OSError:  # a list too long for a file's name
        return False
