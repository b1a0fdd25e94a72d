"""A run under way: what it is about, what it runs on, and where it keeps what it has."""

from collections.abc import Sequence
from dataclasses import dataclass

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.config.run import TuneConfig
from sarathi_tune.machine.gpu import GpuDescription, open_gpu
from sarathi_tune.report.progress import Ui
from sarathi_tune.tune.folder import RunFolder, interrupted_folder, new_folder
from sarathi_tune.tune.machine import Machine, open_machine
from sarathi_tune.tune.settings import DeviceType, Settings, settle


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    config: TuneConfig
    settings: Settings
    folder: RunFolder
    machine: Machine

    def engine_config(self, budget_tokens: int) -> EngineConfig:
        """The built-in engine for predictions and verifications."""
        scheduling = self.config.scheduling
        return EngineConfig(
            token_budget=budget_tokens,
            max_num_seqs=self.settings.decodes,
            num_pages=self.settings.num_pages,
            page_tokens=self.config.device.page_tokens,
            max_model_len=self.settings.max_model_len,
            scheduler=scheduling.scheduler,
            prefix_cache=scheduling.prefix_cache,
            preemption=scheduling.preemption,
        )


def open_job(config: TuneConfig, ui: Ui, budgets_tokens: Sequence[int] = ()) -> Job:
    """Settle the run, load the model, and make or find the run's folder. `budgets_tokens`: those of a sweep.

    Raises OutOfMemoryError, ModelError, DocumentError or UsageError.
    """
    # Before the model is loaded: whoever has nothing to resume should not wait for that.
    interrupted = interrupted_folder(config.out_dir) if config.resume else None
    with ui.phase("prepare"):
        device, gpu = find_device(config)
        settings = settle(config, device, budgets_tokens, gpu)
        machine = open_machine(
            settings.source,
            config.device,
            num_pages=settings.num_pages,
            seed=config.seed,
            max_num_seqs=settings.decodes,
        )
    return Job(config, settings, interrupted or new_folder(config.out_dir, config.model), machine)


def find_device(config: TuneConfig) -> tuple[DeviceType, GpuDescription | None]:
    """The kind of device that the run will use, and the GPU if NVML knows it. Raises UsageError for one that isn't
    there."""
    from sarathi_tune.runtime.runner import resolve_device

    if resolve_device(config.device.device).type != "cuda":
        return "cpu", None
    gpu, _ = open_gpu()
    return "cuda", gpu.describe() if gpu else None
