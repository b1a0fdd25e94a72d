"""The device that steps run on, with a model loaded: opened in one way by every command that times or serves one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sarathi_tune.config.run import DeviceConfig
from sarathi_tune.config.source import ModelSource
from sarathi_tune.machine.conditions import thread_notices
from sarathi_tune.machine.cpu import describe_cpu
from sarathi_tune.machine.gpu import Gpu, open_gpu
from sarathi_tune.notices import Notice, more_ranks_than_cores

if TYPE_CHECKING:
    from sarathi_tune.runtime.parallel.runner import ParallelRunner
    from sarathi_tune.runtime.runner import Runner


@dataclass(frozen=True, slots=True)
class Machine:
    """A loaded model on its device. `gpu` has the counters of the GPU that steps run on, None on a CPU; `notices` is
    what there is to say about the device and the threads."""

    runner: "Runner | ParallelRunner"
    gpu: Gpu | None
    notices: tuple[Notice, ...]


def open_machine(source: ModelSource, steps: DeviceConfig, *, num_pages: int, seed: int, max_num_seqs: int) -> Machine:
    """Set the threads and load the model with `num_pages` pages of KV cache, spread over processes as `steps` asks;
    decode steps of up to `max_num_seqs` requests are captured in CUDA graphs where there are some.

    Raises OutOfMemoryError, ModelError, RankError for another process that fails, or UsageError for a device or an
    attention back end that isn't there, or a model that can't be spread so.
    """
    from sarathi_tune.runtime.parallel.runner import build_runner, local_ranks
    from sarathi_tune.runtime.runner import RunnerOptions

    cpu = describe_cpu()
    options = RunnerOptions(
        num_pages, steps.page_tokens, steps.device, steps.dtype, steps.attention, seed, max_num_seqs
    )
    runner = build_runner(source, options, steps.layout, steps.threads)
    is_gpu = str(runner.description["device"]).startswith("cuda")
    gpu, gpu_notices = open_gpu() if is_gpu else (None, ())
    ranks = local_ranks(runner)
    if ranks > 1 and ranks > cpu.threads:
        about_threads: tuple[Notice, ...] = (more_ranks_than_cores(ranks, cpu.threads),)
    else:
        about_threads = thread_notices(ranks * runner.description["threads"], len(cpu.cores), cpu.quota)
    return Machine(runner, gpu, (*gpu_notices, *about_threads))
