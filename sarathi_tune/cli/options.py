"""The flags that several commands share, and how their text becomes values.

Every flag arrives as text or None, so that a default stands in one place (`config/`) and a bad value gets a sentence of
ours instead of a type's name.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from sarathi_tune.config.engine import PreemptionMode, SchedulerName
from sarathi_tune.config.model import BYTES_PER_ELEMENT
from sarathi_tune.config.parallel import Layout
from sarathi_tune.config.run import (
    DEFAULT_MODEL,
    DEFAULT_OUT_DIR,
    DEFAULT_WORKLOAD,
    DeviceConfig,
    SchedulingConfig,
)
from sarathi_tune.config.slo import Slo
from sarathi_tune.errors import UsageError
from sarathi_tune.units import parse_duration_ms, parse_share, parse_tokens

_OBJECTIVE, _LOAD, _SCHEDULING, _DEVICE, _OUTPUT = "Objective", "Model and load", "Scheduling", "Device", "Output"
#: More of anything that is counted is a typing error; and threads beyond these can't be started.
MAX_COUNT, MAX_THREADS, MAX_SEED = 1 << 20, 1024, (1 << 63) - 1
SCHEDULER_NAMES: tuple[str, ...] = get_args(SchedulerName)

SloItl = Annotated[
    str | None,
    typer.Option("--slo-itl", metavar="TIME", help="p99 time between tokens, e.g. 20ms.", rich_help_panel=_OBJECTIVE),
]
SloTtft = Annotated[
    str | None,
    typer.Option(
        "--slo-ttft", metavar="TIME", help="p99 time to the first token, e.g. 1s.", rich_help_panel=_OBJECTIVE
    ),
]
Overhead = Annotated[
    str | None,
    typer.Option(
        "--overhead",
        metavar="TIME",
        help="Taken off the SLO for what a step doesn't show: HTTP, tokens to text, the network.",
        rich_help_panel=_OBJECTIVE,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|DIR",
        help=f"A preset (random weights) or a directory with config.json. (default: {DEFAULT_MODEL})",
        rich_help_panel=_LOAD,
    ),
]
WorkloadName = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="NAME|FILE",
        help=f"A workload by name, a YAML file, a trace, or fixed:PROMPT:OUTPUT. (default: {DEFAULT_WORKLOAD})",
        rich_help_panel=_LOAD,
    ),
]
MaxNumSeqs = Annotated[
    str | None,
    typer.Option("--max-num-seqs", metavar="N", help="Decodes that run at once.", rich_help_panel=_LOAD),
]
Context = Annotated[
    str | None,
    typer.Option("--context", metavar="N", help="Tokens of context per decode; 8k is 8192.", rich_help_panel=_LOAD),
]
Prefix = Annotated[
    str | None,
    typer.Option("--prefix", metavar="N", help="Tokens in the cache before the chunk.", rich_help_panel=_LOAD),
]
Rate = Annotated[
    str | None,
    typer.Option("--rate", metavar="R", help="Requests per second that will arrive.", rich_help_panel=_LOAD),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="NAME",
        help=f"Of the built-in engine: {', '.join(SCHEDULER_NAMES)}. (default: {SchedulingConfig().scheduler})",
        rich_help_panel=_SCHEDULING,
    ),
]
PrefixCache = Annotated[
    bool | None,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        metavar="",
        help="Compute what prompts share once. (default: off)",
        show_default=False,
        rich_help_panel=_SCHEDULING,
    ),
]
Preemption = Annotated[
    str | None,
    typer.Option(
        "--preemption",
        metavar="|".join(get_args(PreemptionMode)),
        help=f"What happens to a request whose pages are needed. (default: {SchedulingConfig().preemption})",
        rich_help_panel=_SCHEDULING,
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="auto|cpu|cuda", help="Where steps run. (default: auto)", rich_help_panel=_DEVICE),
]
Attention = Annotated[
    str | None,
    typer.Option(
        "--attention", metavar="NAME", help="The attention back end. (default: auto)", rich_help_panel=_DEVICE
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="|".join(BYTES_PER_ELEMENT), help="(default: the model's own)", rich_help_panel=_DEVICE
    ),
]
Threads = Annotated[
    str | None,
    typer.Option(
        "--threads",
        metavar="N",
        help="CPU threads. (default: cores that this process may use)",
        rich_help_panel=_DEVICE,
    ),
]
TensorParallel = Annotated[
    str | None,
    typer.Option(
        "--tensor-parallel",
        metavar="N",
        help="Processes that share each layer; started here, or by torchrun. (default: 1)",
        rich_help_panel=_DEVICE,
    ),
]
PipelineParallel = Annotated[
    str | None,
    typer.Option(
        "--pipeline-parallel", metavar="N", help="Stages that share the layers. (default: 1)", rich_help_panel=_DEVICE
    ),
]
Seed = Annotated[
    str | None,
    typer.Option(
        "--seed", metavar="N", help="Of weights, requests and arrivals. (default: 0)", rich_help_panel=_DEVICE
    ),
]
JsonTarget = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE|-", help="Write the document there; - is stdout, alone.", rich_help_panel=_OUTPUT
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        "--out", metavar="DIR", help=f"Where runs are kept. (default: {DEFAULT_OUT_DIR})", rich_help_panel=_OUTPUT
    ),
]
Resume = Annotated[bool, typer.Option("--resume", metavar="", help="Go on with the run that was interrupted.")]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", metavar="", help="No progress, and only the line to paste.", rich_help_panel=_OUTPUT),
]
Engines = Annotated[
    bool, typer.Option("--engines", metavar="", help="Also print the flags of other engines.", rich_help_panel=_OUTPUT)
]
Headroom = Annotated[
    str | None,
    typer.Option(
        "--headroom",
        metavar="SHARE",
        help="How much longer steps may take than measured and still meet the SLO. (default: 5%, or the noise if "
        "larger; 0% for a hand-written profile)",
        rich_help_panel=_OBJECTIVE,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", metavar="", help="Print the plan, its time and its memory; touch nothing.", rich_help_panel=_OUTPUT
    ),
]


def parse_reserves(overhead: str | None, headroom: str | None) -> dict[str, Any]:
    """What is kept of the SLO: `overhead_ms` and `headroom`, those that were given."""
    return given(
        overhead_ms=parse_duration_ms(overhead, "--overhead") if overhead is not None else None,
        headroom=parse_share(headroom, "--headroom") if headroom is not None else None,
    )


def parse_shared(
    reserves: tuple[str | None, str | None],
    subject: tuple[str | None, str | None],
    load: tuple[str | None, str | None, str | None],
    time_limit: str | None,
    seed: str | None,
    out: str | None,
) -> dict[str, Any]:
    """What the main job asks here and of a live server alike, by the configuration's names, as far as given: (overhead,
    headroom), (model, workload), (max_num_seqs, context, prefix), and so on."""
    model, workload = subject
    max_num_seqs, context, prefix = load
    return parse_reserves(*reserves) | given(
        model=model,
        workload=workload,
        max_num_seqs=parse_count(max_num_seqs, "--max-num-seqs"),
        context_tokens=parse_token_count(context, "--context"),
        prefix_tokens=parse_token_count(prefix, "--prefix", zero=True),
        time_limit_s=parse_duration_ms(time_limit, "--time-limit") / 1e3 if time_limit is not None else None,
        seed=parse_seed(seed),
        out_dir=parse_path(out, "--out"),
    )


def parse_slo(itl: str | None, ttft: str | None, usage: str) -> Slo:
    """The objective. Raises UsageError when there is none, with `usage` as the example."""
    if itl is None:
        raise UsageError(f"An objective is missing: {usage}")
    return Slo(
        itl_ms=parse_duration_ms(itl, "--slo-itl"),
        ttft_ms=parse_duration_ms(ttft, "--slo-ttft") if ttft is not None else None,
    )


def parse_device(
    device: str | None,
    attention: str | None,
    dtype: str | None,
    threads: str | None,
    layout: tuple[str | None, str | None] = (None, None),
) -> DeviceConfig:
    """Where and how steps run. `layout`: tensor-parallel ranks and pipeline stages."""
    tensor, pipeline = layout
    return DeviceConfig(
        **given(
            device=parse_choice(device, "--device", ("auto", "cpu", "cuda")),
            attention=attention,
            dtype=parse_choice(dtype, "--dtype", tuple(BYTES_PER_ELEMENT)),
            threads=parse_count(threads, "--threads", largest=MAX_THREADS),
            layout=Layout(
                **given(
                    tensor=parse_count(tensor, "--tensor-parallel"),
                    pipeline=parse_count(pipeline, "--pipeline-parallel"),
                )
            ),
        )
    )


def parse_scheduling(scheduler: str | None, prefix_cache: bool | None, preemption: str | None) -> SchedulingConfig:
    """How the built-in engine schedules."""
    return SchedulingConfig(
        **given(
            scheduler=parse_choice(scheduler, "--scheduler", SCHEDULER_NAMES),
            prefix_cache=prefix_cache,
            preemption=parse_choice(preemption, "--preemption", get_args(PreemptionMode)),
        )
    )


def parse_count(text: str | None, flag: str, smallest: int = 1, largest: int = MAX_COUNT) -> int | None:
    """A whole number from `smallest` to `largest`."""
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        raise UsageError(f"{flag} must be a whole number, not {text!r}.") from None
    if value < smallest:
        raise UsageError(f"{flag} must be at least {smallest}, not {value}.")
    if value > largest:
        raise UsageError(f"{flag} must be at most {largest}, not {value}.")
    return value


def parse_seed(text: str | None) -> int | None:
    """A seed, as torch and numpy take it."""
    return parse_count(text, "--seed", smallest=0, largest=MAX_SEED)


def parse_path(text: str | None, flag: str) -> Path | None:
    """A path. The empty one, which an unset variable of a script leaves, would be the current directory."""
    if text is None:
        return None
    if not text.strip():
        raise UsageError(f"{flag} is empty: give a path.")
    return Path(text)


def parse_token_count(text: str | None, flag: str, *, zero: bool = False) -> int | None:
    """A token count, `8k` included; 0 only where `zero` allows it."""
    if text is None:
        return None
    return 0 if zero and text.strip() == "0" else parse_tokens(text, flag)


def parse_rate(text: str | None, flag: str = "--rate") -> float | None:
    """Requests per second, greater than zero."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{flag} must be a number of requests per second, not {text!r}.") from None
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{flag} must be a positive number of requests per second, not {text!r}.")
    return value


def parse_choice(text: str | None, flag: str, choices: Sequence[str]) -> Any:
    """One of `choices`."""
    if text is not None and text not in choices:
        raise UsageError(f"{flag} must be one of {', '.join(choices)}, not {text!r}.")
    return text


def parse_list(text: str | None, parse: Any, flag: str) -> tuple[Any, ...]:
    """`256,512,1k`: each part by `parse`."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{flag} must be values with commas between them, not {text!r}.")
    return tuple(parse(part, flag) for part in parts)


def given(**arguments: Any) -> dict[str, Any]:
    """Those that aren't None: the others keep the default of the dataclass that they go to."""
    return {name: value for name, value in arguments.items() if value is not None}
