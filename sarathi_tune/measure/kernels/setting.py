"""What all kernels are timed with: the model's shapes, the device, and how long each may take."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.engine.pages import PagePool
from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.measure.bench import Bench
from sarathi_tune.measure.ceilings import Ceilings
from sarathi_tune.measure.timer import Timer
from sarathi_tune.stats import median

#: Copies of weights or cache that a kernel goes through, so that the next one isn't in the processor's cache: a step
#: comes back to a layer only after all others.
COLD_BYTES = 192 << 20
#: At most so much memory for one kernel's data.
MOST_BYTES = 1 << 30
_FEWEST_RUNS = 5


@dataclass(frozen=True, slots=True)
class Setting:
    """`seconds` is for one kernel at one size."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    page_tokens: int
    ceilings: Ceilings
    timer: Timer
    seconds: float
    attention: str = "auto"
    seed: int = 0

    def copies(self, num_bytes: int, most: int) -> int:
        """How many copies of `num_bytes` make the data cold, at most `most`."""
        wanted = max(1, -(-COLD_BYTES // max(1, num_bytes)))
        return max(1, min(wanted, most, MOST_BYTES // max(1, num_bytes)))

    def time_ms(self, work: Callable[[], object], calls: int = 1) -> tuple[float, float]:
        """(median, best) milliseconds per call of a work that makes `calls` of them. The first run is dropped."""
        end_s = time.perf_counter() + self.seconds
        self.timer.time_ms(work)
        times = [self.timer.time_ms(work) for _ in range(_FEWEST_RUNS)]
        while time.perf_counter() < end_s:
            times.append(self.timer.time_ms(work))
        return median(times) / calls, min(times) / calls

    def random(self, *shape: int) -> torch.Tensor:
        """Normally distributed numbers of the model's dtype on the device."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(*shape, generator=generator).to(self.device, self.dtype)


def planning_bench(num_pages: int, setting: Setting) -> Bench:
    """A bench that only makes plans over `num_pages` pages."""
    pool = PagePool(num_pages, setting.page_tokens)
    return Bench(_Nobody(), pool, vocab_size=setting.config.vocab_size, seed=setting.seed)


class _Nobody:
    def execute(self, plan: StepPlan) -> list[int]:  # noqa: ARG002
        raise AssertionError("kernels are timed one by one")
