"""`sarathi-tune doctor`: what this machine offers, which back ends steps would use and why, and what would spoil a
measurement."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sarathi_tune.cli import options as flags
from sarathi_tune.cli.consoles import data_console
from sarathi_tune.cli.edge import edge
from sarathi_tune.cli.output import STDOUT, check_target, emit_document
from sarathi_tune.config.run import DEFAULT_MODEL, DeviceConfig
from sarathi_tune.errors import ExitCode
from sarathi_tune.units import format_bytes

if TYPE_CHECKING:
    from sarathi_tune.machine.conditions import Conditions
    from sarathi_tune.notices import Notice

#: How long the machine is watched for work of others.
WATCH_S = 1.0


@edge
def doctor(
    model: flags.Model = None,
    device: flags.Device = None,
    attention: flags.Attention = None,
    dtype: flags.Dtype = None,
    threads: flags.Threads = None,
    json_target: flags.JsonTarget = None,
) -> ExitCode:
    """Say what this machine offers, which back ends would be used and why, and what would spoil a measurement."""
    steps = flags.parse_device(device, attention, dtype, threads)
    check_target(json_target)
    document, notices = _examine(model or DEFAULT_MODEL, steps)
    emit_document(document | {"notices": [notice.as_dict() for notice in notices]}, json_target)
    if json_target != STDOUT:
        _print(document, notices)
    return ExitCode.MET


def _examine(model: str, steps: DeviceConfig) -> tuple[dict[str, Any], tuple["Notice", ...]]:
    """The findings by section, and the notices."""
    from sarathi_tune.machine.conditions import condition_notices, thread_notices
    from sarathi_tune.machine.description import describe_machine

    torch_build, runtime, gpu, gpu_notices = _runtime(model, steps)
    machine = describe_machine(gpu)
    cpu = machine.cpu
    conditions = _watch(gpu)
    document = {
        "machine": machine.as_dict(),
        "torch": torch_build,
        "engine": runtime,
        "conditions": conditions.as_dict(),
    }
    return document, (
        *thread_notices(steps.threads or cpu.threads, len(cpu.cores), cpu.quota),
        *gpu_notices,
        *condition_notices([conditions]),
    )


def _runtime(model: str, steps: DeviceConfig) -> tuple[dict[str, Any], dict[str, Any], Any, tuple["Notice", ...]]:
    """torch's build, the back ends that would be picked for `model`, and the GPU if steps run on one."""
    import torch

    from sarathi_tune.config.presets import resolve_model
    from sarathi_tune.machine.gpu import open_gpu
    from sarathi_tune.runtime.attention.base import AttentionShape
    from sarathi_tune.runtime.attention.pick import attention_candidates, pick_attention
    from sarathi_tune.runtime.layers.linear import pick_linear
    from sarathi_tune.runtime.runner import resolve_device, with_dtype
    from sarathi_tune.runtime.weights import TORCH_DTYPES

    config = with_dtype(resolve_model(model).config, steps.dtype)
    place, dtype = resolve_device(steps.device), TORCH_DTYPES[config.dtype]
    shape = AttentionShape.of(config)
    attention = pick_attention(shape, place, dtype, steps.page_tokens, steps.attention)
    others = attention_candidates(shape, place, dtype, steps.page_tokens)
    linear = pick_linear(place, dtype)
    gpu, notices = open_gpu() if place.type == "cuda" else (None, ())
    build = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    engine = {
        "model": config.name,
        "dtype": config.dtype,
        "device": str(place),
        "attention": attention.name,
        "attention_reason": attention.reason,
        "other_attention": {
            other.name: other.obstacle or f"it can run here, and {attention.name} goes before it"
            for other in others
            if other.name != attention.name
        },
        "linear": linear.name,
        "linear_reason": linear.reason,
    }
    return build, engine, gpu, notices


def _watch(gpu: Any) -> "Conditions":
    from sarathi_tune.machine.conditions import ConditionsProbe

    probe = ConditionsProbe(gpu=gpu)
    probe.start()
    time.sleep(WATCH_S)
    return probe.stop()


def _print(document: Mapping[str, Mapping[str, Any]], notices: tuple["Notice", ...]) -> None:
    from rich.text import Text

    from sarathi_tune.report.console import print_facts, print_notices
    from sarathi_tune.report.glyphs import glyphs_for

    console = data_console()
    for title, facts in document.items():
        print_facts(title.capitalize(), _rows(facts), console)
    print_notices([notice.as_dict() for notice in notices], console, glyphs_for(console))
    if not notices:
        console.print()
        console.print(Text("Nothing that would spoil a measurement was found.", style="green"))


def _rows(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Facts as (name, value), nested ones with their parent's name before theirs."""
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            rows += _rows(value, f"{name} ")
        elif isinstance(value, list):
            rows.append((label, " ".join(map(str, value)) or "none"))
        elif value is not None:
            rows.append((label.removesuffix(" bytes"), format_bytes(value) if name.endswith("_bytes") else str(value)))
    return rows
