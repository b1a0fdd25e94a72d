"""Test doubles for measuring: a device with a known cost on a clock of its own."""

from collections.abc import Callable

from sarathi_tune.measure.shapes import Shape


def laptop_ms(shape: Shape) -> float:
    """A 2-core CPU with a 135M model, roughly: weights 15 ms, 0.3 ms per token, attention on top."""
    chunk_keys = shape.chunk * (shape.prefix + shape.chunk / 2)
    return max(15.0, 0.3 * shape.num_tokens) + 1e-3 * shape.decodes * shape.context + 3e-5 * chunk_keys


def server_ms(shape: Shape) -> float:
    """A large GPU with an 8B model, roughly: weights 7 ms, 0.02 ms per token."""
    chunk_keys = shape.chunk * (shape.prefix + shape.chunk / 2)
    return max(7.0, 0.02 * shape.num_tokens) + 3e-5 * shape.decodes * shape.context + 3e-7 * chunk_keys


class FakeTimer:
    """Times shapes by a formula; the first step of each takes ten times as long. Its clock only moves by steps."""

    def __init__(self, cost_ms: Callable[[Shape], float] = laptop_ms, fails: Callable[[Shape], bool] | None = None):
        self.now_s = 1000.0
        self.calls: list[Shape] = []
        self.num_recovered = 0
        self.interrupt_at: int | None = None
        self._cost_ms = cost_ms
        self._fails = fails or (lambda _: False)

    def clock_s(self) -> float:
        return self.now_s

    def time_shape(self, shape: Shape) -> float:
        if self.interrupt_at is not None and len(self.calls) == self.interrupt_at:
            raise KeyboardInterrupt
        is_first = shape not in self.calls
        self.calls.append(shape)
        if self._fails(shape):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nlong tail")
        time_ms = self._cost_ms(shape) * (10.0 if is_first else 1.0)
        self.now_s += time_ms / 1e3
        return time_ms

    def recover(self) -> None:
        self.num_recovered += 1
