"""A run under way: what it is about, what it runs on, and where it keeps what it has."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.config.run import TuneConfig
from sarathi_tune.machine.conditions import thread_notices
from sarathi_tune.machine.cpu import describe_cpu
from sarathi_tune.machine.gpu import Gpu, open_gpu
from sarathi_tune.notices import Notice
from sarathi_tune.report.progress import Ui
from sarathi_tune.tune.folder import RunFolder, interrupted_folder, new_folder
from sarathi_tune.tune.settings import DeviceType, Settings, settle

if TYPE_CHECKING:
    from sarathi_tune.runtime.runner import Runner


@dataclass(frozen=True, slots=True)
class Job:
    """One run. `gpu` has the counters of the GPU that steps run on, None on a CPU; `notices` is what there is to say
    about the device and the threads."""

    config: TuneConfig
    settings: Settings
    folder: RunFolder
    runner: "Runner"
    gpu: Gpu | None
    notices: tuple[Notice, ...]

    def engine_config(self, budget_tokens: int) -> EngineConfig:
        """The built-in engine for predictions and verifications. The prefix cache is off: prompts are unique."""
        return EngineConfig(
            token_budget=budget_tokens,
            max_num_seqs=self.settings.decodes,
            num_pages=self.settings.num_pages,
            page_tokens=self.config.device.page_tokens,
            max_model_len=self.settings.max_model_len,
        )


def open_job(config: TuneConfig, ui: Ui) -> Job:
    """Settle the run, make or find its folder, and load the model with its threads set.

    Raises OutOfMemoryError, ModelError, DocumentError or UsageError.
    """
    import torch

    from sarathi_tune.runtime.runner import Runner

    with ui.phase("prepare"):
        settings = settle(config, device_type(config))
        cpu = describe_cpu()
        threads = config.device.threads or cpu.threads
        torch.set_num_threads(threads)
        runner = Runner.build(
            settings.source,
            num_pages=settings.num_pages,
            page_tokens=config.device.page_tokens,
            device=config.device.device,
            dtype=config.device.dtype,
            attention=config.device.attention,
            seed=config.seed,
        )
        is_gpu = str(runner.description["device"]).startswith("cuda")
        gpu, gpu_notices = open_gpu() if is_gpu else (None, ())
        folder = interrupted_folder(config.out_dir) if config.resume else new_folder(config.out_dir, config.model)
    notices = (*gpu_notices, *thread_notices(threads, len(cpu.cores), cpu.quota))
    return Job(config, settings, folder, runner, gpu, notices)


def device_type(config: TuneConfig) -> DeviceType:
    """The kind of device that the run will use. Raises UsageError for one that isn't there."""
    from sarathi_tune.runtime.runner import resolve_device

    return "cuda" if resolve_device(config.device.device).type == "cuda" else "cpu"
