"""What is blamed on the machine, from scripted counters."""

import time

import pytest

from sarathi_tune.machine.cgroup import Throttling
from sarathi_tune.machine.conditions import (
    Conditions,
    ConditionsProbe,
    CpuSeconds,
    Snapshot,
    SystemCounters,
    condition_notices,
    noise_notices,
    thread_notices,
)
from sarathi_tune.machine.gpu import GpuState

NEVER = Throttling()


class ScriptedCounters:
    """Counters of a 4-core machine that hand out the given snapshots."""

    num_cores = 4

    def __init__(self, *snapshots: Snapshot) -> None:
        self._snapshots = list(snapshots)

    def snapshot(self) -> Snapshot:
        return self._snapshots.pop(0)

    def load_1m(self) -> float:
        return 3.5

    def clock_mhz(self) -> float | None:
        return 2600.0


def watch(busy: float, own: float, stolen: float = 0.0, throttling: Throttling = NEVER) -> Conditions:
    """Conditions of a round of 10 s in which the cores were busy for `busy` seconds in all, `own` of them ours."""
    before = Snapshot(100.0, CpuSeconds(1000.0, 50.0), 7.0, Throttling(3, 0.25))
    after = Snapshot(
        110.0,
        CpuSeconds(1000.0 + busy, 50.0 + stolen),
        7.0 + own,
        Throttling(3 + throttling.num_periods, 0.25 + throttling.seconds),
    )
    probe = ConditionsProbe(ScriptedCounters(before, after))
    probe.start()
    return probe.stop()


def test_our_own_work_is_not_held_against_the_machine() -> None:
    conditions = watch(busy=20.1, own=20.0)
    assert conditions.own_cores == pytest.approx(2.0)
    assert conditions.other_cores == pytest.approx(0.01)
    assert condition_notices([conditions]) == ()


def test_other_processes_are_counted_and_said() -> None:
    conditions = watch(busy=35.0, own=20.0)
    assert conditions.other_cores == pytest.approx(1.5)
    (notice,) = condition_notices([conditions])
    assert notice.code == "machine-busy"
    assert "1.5 of 4 cores" in notice.cause


def test_ticks_that_come_out_below_zero_are_zero() -> None:
    assert watch(busy=19.99, own=20.0).other_cores == 0.0


def test_steal_and_throttling() -> None:
    conditions = watch(busy=20.0, own=20.0, stolen=2.0, throttling=Throttling(20, 1.5))
    assert conditions.steal_share == pytest.approx(0.05)
    assert (conditions.throttled_periods, conditions.throttled_s) == (20, 1.5)
    assert [notice.code for notice in condition_notices([conditions])] == ["cpu-stolen", "cgroup-throttled"]


def test_rounds_weigh_by_their_length() -> None:
    # 10 s of quiet and 10 s with one busy core: half a core on average, above 5 % of 4 cores.
    codes = [notice.code for notice in condition_notices([watch(20.0, 20.0), watch(30.0, 20.0)])]
    assert codes == ["machine-busy"]
    assert condition_notices([]) == ()


def with_gpu(state: GpuState) -> Conditions:
    return Conditions(1.0, 4, 0.1, 1.0, 0.0, 0.0, 0, 0.0, None, state)


def test_gpu_held_back_by_heat_is_a_warning_and_by_its_power_cap_an_information() -> None:
    hot = with_gpu(GpuState(sm_clock_mhz=1200, throttle_reasons=("hardware-thermal",)))
    full = with_gpu(GpuState(sm_clock_mhz=1755, throttle_reasons=("power-cap",)))
    (notice,) = condition_notices([hot, full])
    assert (notice.code, notice.severity) == ("gpu-throttled", "warning")
    assert "1200 to 1755 MHz" in notice.cause
    (notice,) = condition_notices([full])
    assert notice.severity == "info"


def test_a_shared_gpu_is_said() -> None:
    assert [notice.code for notice in condition_notices([with_gpu(GpuState(num_processes=2))])] == ["gpu-shared"]
    assert condition_notices([with_gpu(GpuState(num_processes=1))]) == ()


@pytest.mark.parametrize(
    ("threads", "cores", "quota", "said"),
    [(2, 2, None, False), (3, 2, None, True), (4, 8, 2.5, True), (2, 8, 2.5, False), (1, 8, 0.5, False)],
)
def test_more_threads_than_quota(threads: int, cores: int, quota: float | None, said: bool) -> None:
    codes = [notice.code for notice in thread_notices(threads, cores, quota)]
    assert codes == (["more-threads-than-quota"] if said else [])


def test_noise() -> None:
    assert noise_notices(None) == noise_notices(0.03) == ()
    (notice,) = noise_notices(0.12)
    assert "12.0%" in notice.cause


def test_the_systems_own_counters_see_this_process_work() -> None:
    probe = ConditionsProbe(SystemCounters())
    probe.start()
    end_s = time.process_time() + 0.15
    while time.process_time() < end_s:
        pass
    conditions = probe.stop()
    # CPU time over wall time, which is longer on a busy machine.
    assert conditions.own_cores * conditions.duration_s == pytest.approx(0.15, abs=0.05)
    document = conditions.as_dict()
    assert document["cores"] == conditions.num_cores >= 1
    assert "gpu" not in document
