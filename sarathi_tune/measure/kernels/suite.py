"""All kernels of a model's shapes on one device."""

from collections.abc import Callable, Iterator

import torch

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.config.run import DeviceConfig
from sarathi_tune.machine.conditions import ConditionsProbe, condition_notices
from sarathi_tune.machine.cpu import describe_cpu
from sarathi_tune.machine.description import describe_machine
from sarathi_tune.machine.gpu import open_gpu
from sarathi_tune.measure.ceilings import measure_ceilings
from sarathi_tune.measure.failures import out_of_memory_reason
from sarathi_tune.measure.kernels.attention import attention_figures, pick
from sarathi_tune.measure.kernels.collective import all_reduce_figures
from sarathi_tune.measure.kernels.figure import Group, KernelFigure, KernelReport
from sarathi_tune.measure.kernels.linear import linear_figures
from sarathi_tune.measure.kernels.linear import pick as pick_linear
from sarathi_tune.measure.kernels.memory import sampling_figures, write_figures
from sarathi_tune.measure.kernels.setting import Setting
from sarathi_tune.measure.timer import make_timer
from sarathi_tune.runtime.layers.elementwise import pick_elementwise
from sarathi_tune.runtime.runner import resolve_device, with_dtype
from sarathi_tune.runtime.weights import TORCH_DTYPES

SUITES: dict[Group, Callable[[Setting], Iterator[KernelFigure]]] = {
    "attention": attention_figures,
    "linear": linear_figures,
    "kv-write": write_figures,
    "sampling": sampling_figures,
    "all-reduce": all_reduce_figures,
}
#: Figures of all groups together, about: for a progress bar.
NUM_FIGURES = 71


def measure_kernels(
    config: ModelConfig,
    steps: DeviceConfig,
    groups: tuple[Group, ...],
    *,
    seconds: float = 0.25,
    ceiling_seconds: float = 4.0,
    seed: int = 0,
    progress: Callable[[KernelFigure], None] | None = None,
) -> KernelReport:
    """Time the kernels of `groups`, each for `seconds`, behind the ceilings. One that doesn't fit into memory becomes a
    figure with its reason, and so do the rest of its group.

    Raises UsageError for a device or an attention back end that isn't there.
    """
    config = with_dtype(config, steps.dtype)
    device, dtype = resolve_device(steps.device), TORCH_DTYPES[config.dtype]
    torch.set_num_threads(steps.threads or describe_cpu().threads)
    gpu, notices = open_gpu() if device.type == "cuda" else (None, ())
    probe = ConditionsProbe(gpu=gpu)
    probe.start()
    setting = Setting(
        config=config,
        device=device,
        dtype=dtype,
        page_tokens=steps.page_tokens,
        ceilings=measure_ceilings(str(device), config.dtype, ceiling_seconds),
        timer=make_timer(str(device)),
        seconds=seconds,
        attention=steps.attention,
        seed=seed,
    )
    attention = pick(setting)
    figures: list[KernelFigure] = []
    with torch.inference_mode():
        for group in groups:
            for figure in _guarded(group, setting):
                figures.append(figure)
                if progress:
                    progress(figure)
    return KernelReport(
        figures=tuple(figures),
        ceilings=setting.ceilings,
        model=config.name,
        engine={
            "device": str(device),
            "dtype": config.dtype,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "attention": attention.name,
            "linear": pick_linear(setting).name,
            "elementwise": pick_elementwise(device, dtype).name,
        },
        machine=describe_machine(gpu).as_dict(),
        notices=tuple(notice.as_dict() for notice in (*notices, *condition_notices([probe.stop()]))),
    )


def _guarded(group: Group, setting: Setting) -> Iterator[KernelFigure]:
    try:
        yield from SUITES[group](setting)
    except Exception as error:
        reason = out_of_memory_reason(error)
        if reason is None:
            raise
        yield KernelFigure(group, "the rest", 0, skipped=reason)
