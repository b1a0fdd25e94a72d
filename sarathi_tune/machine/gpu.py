"""The GPU through NVML: what it is, how fast it is clocked right now, and what holds it back.

Thin on purpose. NVML is optional and is often denied (in a MIG slice, in a container without the driver's management
library); whatever it refuses is said in a notice instead of being replaced by a quiet default (vLLM #55381).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sarathi_tune import notices
from sarathi_tune.notices import Notice

_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_TEMPERATURE_GPU = 0
#: Bits of `nvmlDeviceGetCurrentClocksEventReasons` (nvml.h), without "idle" (0x1) and the clocks that an
#: administrator set (0x2, 0x100), which aren't throttling.
_REASONS = {
    0x4: "power-cap",
    0x8: "hardware-slowdown",
    0x10: "sync-boost",
    0x20: "software-thermal",
    0x40: "hardware-thermal",
    0x80: "power-brake",
}


@dataclass(frozen=True, slots=True)
class GpuDescription:
    """One GPU, or one MIG slice of it. None stands for what could not be read."""

    name: str
    memory_bytes: int | None
    compute_capability: str | None
    mig: bool | None = None
    driver: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The description as it stands in a JSON document."""
        return {
            "name": self.name,
            "memory_bytes": self.memory_bytes,
            "compute_capability": self.compute_capability,
            "mig": self.mig,
            "driver": self.driver,
        }


@dataclass(frozen=True, slots=True)
class GpuState:
    """The GPU at one moment. None stands for what could not be read."""

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    num_processes: int | None = None


class Gpu:
    """An open NVML handle. Every read that NVML refuses is remembered in `denied` and told once by `notices`."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.denied: dict[str, str] = {}

    def describe(self) -> GpuDescription:
        """Name, memory, compute capability, whether it is cut into MIG slices, and the driver."""
        capability = self._read("compute capability", self._nvml.nvmlDeviceGetCudaComputeCapability)
        memory = self._read("memory", self._nvml.nvmlDeviceGetMemoryInfo)
        name = self._read("name", self._nvml.nvmlDeviceGetName)
        # Not a denial: GPUs without MIG answer this question with an error.
        mig = self._quietly(self._nvml.nvmlDeviceGetMigMode)
        return GpuDescription(
            name=_as_text(name) if name is not None else "NVIDIA GPU",
            memory_bytes=int(memory.total) if memory is not None else None,
            compute_capability=f"{capability[0]}.{capability[1]}" if capability is not None else None,
            mig=bool(mig[0]) if mig is not None else None,
            driver=self._driver(),
        )

    def state(self) -> GpuState:
        """Clocks, temperature, power, reasons for lower clocks, and how many processes compute on the GPU."""
        nvml = self._nvml
        power_mw = self._read("power", nvml.nvmlDeviceGetPowerUsage)
        processes = self._read("processes", nvml.nvmlDeviceGetComputeRunningProcesses)
        return GpuState(
            sm_clock_mhz=self._read("clocks", nvml.nvmlDeviceGetClockInfo, _CLOCK_SM),
            memory_clock_mhz=self._read("clocks", nvml.nvmlDeviceGetClockInfo, _CLOCK_MEMORY),
            temperature_c=self._read("temperature", nvml.nvmlDeviceGetTemperature, _TEMPERATURE_GPU),
            power_w=power_mw / 1e3 if power_mw is not None else None,
            throttle_reasons=self._throttle_reasons(),
            num_processes=len(processes) if processes is not None else None,
        )

    def notices(self) -> tuple[Notice, ...]:
        """One notice that lists all that was refused; none when nothing was."""
        if not self.denied:
            return ()
        return (notices.nvml_denied(tuple(self.denied), next(iter(self.denied.values()))),)

    def _throttle_reasons(self) -> tuple[str, ...]:
        # NVML renamed the call in driver 535; older bindings know the old name only.
        read = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        read = read or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        mask = self._read("throttle reasons", read)
        return tuple(name for bit, name in _REASONS.items() if mask is not None and mask & bit)

    def _read(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            self.denied.setdefault(what, str(error))
            return None

    def _quietly(self, call: Callable[..., Any]) -> Any:
        try:
            return call(self._handle)
        except self._nvml.NVMLError:
            return None

    def _driver(self) -> str | None:
        try:
            return _as_text(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
            return None


def open_gpu(
    index: int = 0, uuid: str | None = None, nvml: Any = None, environment: Mapping[str, str] | None = None
) -> tuple[Gpu | None, tuple[Notice, ...]]:
    """Open CUDA device `index` in NVML, by `uuid` where the caller knows it, or nothing and the notice that says why.

    `nvml` is the `pynvml` module, `environment` the process's (both for tests).
    """
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return None, (notices.nvml_missing(),)
        nvml = pynvml
    selector = uuid or _visible_device(index, os.environ if environment is None else environment)
    try:
        nvml.nvmlInit()
        if selector.isdecimal():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(selector))
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(selector)
    except nvml.NVMLError as error:
        return None, (notices.nvml_denied(("the device",), str(error)),)
    return Gpu(nvml, handle), ()


def _visible_device(index: int, environment: Mapping[str, str]) -> str:
    """What NVML calls CUDA device `index`: CUDA counts only the visible devices, NVML counts all."""
    visible = [entry.strip() for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    return visible[index] if index < len(visible) else str(index)


def _as_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
