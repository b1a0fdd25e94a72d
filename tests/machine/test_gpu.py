"""The GPU through a scripted NVML: what is read, and what is said when NVML refuses."""

from types import SimpleNamespace
from typing import Any

import pytest

from sarathi_tune.machine.gpu import open_gpu


class NVMLError(Exception):
    """The binding's exception."""


class FakeNvml:
    """NVML of one H100 with the calls of `nvidia-ml-py`; those in `denied` fail as they do in a MIG slice."""

    NVMLError = NVMLError

    def __init__(self, denied: frozenset[str] = frozenset(), reasons: int = 0x4) -> None:
        self.denied = denied
        self.reasons = reasons
        self.opened: str | int | None = None

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "550.54.15",
            "nvmlDeviceGetHandleByIndex": self._open,
            "nvmlDeviceGetHandleByUUID": self._open,
            "nvmlDeviceGetName": lambda _: b"NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=85520809984, free=8, used=9),
            "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
            "nvmlDeviceGetMigMode": lambda _: [0, 0],
            "nvmlDeviceGetClockInfo": lambda _, kind: {1: 1980, 2: 2619}[kind],
            "nvmlDeviceGetTemperature": lambda _, sensor: {0: 61}[sensor],
            "nvmlDeviceGetPowerUsage": lambda _: 699_500,
            "nvmlDeviceGetComputeRunningProcesses": lambda _: [SimpleNamespace(pid=1)],
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: self.reasons,
        }
        if name not in values:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            if name in self.denied:
                raise NVMLError("Insufficient Permissions")
            return values[name](*arguments)

        return call

    def _open(self, selector: str | int) -> str:
        self.opened = selector
        return "handle"


def test_reads_the_device() -> None:
    gpu, notices = open_gpu(nvml=FakeNvml(), environment={})
    assert gpu is not None
    assert notices == ()
    description = gpu.describe()
    assert (description.name, description.memory_bytes) == ("NVIDIA H100 80GB HBM3", 85520809984)
    assert (description.compute_capability, description.mig, description.driver) == ("9.0", False, "550.54.15")
    state = gpu.state()
    assert (state.sm_clock_mhz, state.memory_clock_mhz) == (1980, 2619)
    assert (state.temperature_c, state.power_w, state.num_processes) == (61, 699.5, 1)
    assert state.throttle_reasons == ("power-cap",)
    assert gpu.notices() == ()


def test_idle_and_administrator_clocks_are_not_throttling() -> None:
    gpu, _ = open_gpu(nvml=FakeNvml(reasons=0x1 | 0x2 | 0x100), environment={})
    assert gpu is not None
    assert gpu.state().throttle_reasons == ()


def test_thermal_reasons() -> None:
    gpu, _ = open_gpu(nvml=FakeNvml(reasons=0x8 | 0x40), environment={})
    assert gpu is not None
    assert gpu.state().throttle_reasons == ("hardware-slowdown", "hardware-thermal")


def test_denied_in_a_mig_slice_is_said_and_nothing_is_assumed() -> None:
    # vLLM #55381: NVML denied, the smallest defaults taken silently.
    denied = frozenset({"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetClockInfo", "nvmlDeviceGetPowerUsage"})
    gpu, _ = open_gpu(nvml=FakeNvml(denied), environment={})
    assert gpu is not None
    assert gpu.describe().memory_bytes is None
    assert gpu.state().sm_clock_mhz is None
    (notice,) = gpu.notices()
    assert (notice.code, notice.severity) == ("nvml-denied", "warning")
    assert "memory, power, clocks" in notice.cause
    assert "Insufficient Permissions" in notice.cause


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetHandleByIndex"])
def test_no_access_at_all_is_said(call: str) -> None:
    gpu, notices = open_gpu(nvml=FakeNvml(frozenset({call})), environment={})
    assert gpu is None
    assert [notice.code for notice in notices] == ["nvml-denied"]


@pytest.mark.parametrize(
    ("environment", "index", "uuid", "opened"),
    [
        ({}, 1, None, 1),
        ({"CUDA_VISIBLE_DEVICES": "3,5"}, 1, None, 5),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1234"}, 0, None, "MIG-1234"),
        ({"CUDA_VISIBLE_DEVICES": "3,5"}, 1, "GPU-77", "GPU-77"),
    ],
)
def test_cuda_counts_visible_devices_and_nvml_all(
    environment: dict[str, str], index: int, uuid: str | None, opened: str | int
) -> None:
    nvml = FakeNvml()
    open_gpu(index, uuid, nvml, environment)
    assert nvml.opened == opened
