"""What is timed: the execution, not the launch."""

import time
from collections.abc import Callable

from sarathi_tune.measure.timer import CpuTimer, DeviceTimer, make_timer


class LazyDevice:
    """A device with a queue, on a clock that only work moves: launching costs 0.1 ms, execution comes on waiting."""

    def __init__(self) -> None:
        self.now_s = 5.0
        self.queued_s: list[float] = []

    def launch(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now_s += 1e-4
            self.queued_s.append(seconds)

        return run

    def synchronise(self) -> None:
        self.now_s += sum(self.queued_s)
        self.queued_s.clear()

    def clock_s(self) -> float:
        return self.now_s


def test_the_execution_is_timed_and_not_the_launch() -> None:
    # vllm-ascend #8769: the asynchronous launch was timed.
    device = LazyDevice()
    timer = DeviceTimer(device.synchronise, device.clock_s)
    assert round(timer.time_ms(device.launch(0.030)), 6) == 30.1


def test_earlier_work_is_not_billed_to_the_step() -> None:
    device = LazyDevice()
    timer = DeviceTimer(device.synchronise, device.clock_s)
    device.launch(2.0)()
    assert round(timer.time_ms(device.launch(0.030)), 6) == 30.1


def test_the_cpu_timer_waits_for_the_call() -> None:
    assert CpuTimer().time_ms(lambda: time.sleep(0.02)) >= 20.0


def test_a_cpu_needs_no_synchronisation() -> None:
    assert isinstance(make_timer("cpu"), CpuTimer)
