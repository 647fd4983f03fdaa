"""What the machine does now: CPU, memory and, where NVIDIA's library finds one, GPUs. Read when asked, never in a thread.

`Machine().sample()` gives rates since the sample before. It needs psutil; `nvidia-ml-py` (the module pynvml) is used when
it is installed and finds a driver. Whatever a machine does not tell is None: no load on Windows, no power on some GPUs.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import psutil


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory in bytes, power in watts, clocks in MHz, temperature in °C, utilisation in percent; None: not told."""

    name: str
    utilisation: float | None
    memory_used: int | None
    memory_total: int | None
    power: float | None
    power_limit: float | None
    clock: int | None
    memory_clock: int | None
    temperature: int | None


@dataclass(frozen=True, slots=True)
class Sample:
    """Percent of one core, bytes."""

    cores: tuple[float, ...]  # busy, each
    process: float  # CPU of this process, all its threads
    viewer: float  # CPU of the calling thread, which draws the views
    resident: int  # memory of this process
    memory_used: int
    memory_total: int
    load: float | None  # mean of runnable tasks over a minute
    gpus: tuple[Gpu, ...]


def find_nvml() -> ModuleType | None:
    """NVIDIA's management library, ready to be asked; None without it, its driver or a GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml if pynvml.nvmlDeviceGetCount() else None
    except pynvml.NVMLError:
        return None


class Machine:
    """`nvml`: what `find_nvml` gave, or anything with the same functions."""

    def __init__(self, nvml: Any = None):
        self._nvml = nvml
        self._process = psutil.Process()
        self._thread = threading.get_ident()
        self._before = self._read()

    def sample(self) -> Sample:
        """Rates are since the sample before, or since this object was made."""
        if self._thread != threading.get_ident():  # its time is another's
            self._thread = threading.get_ident()
            self._before = (*self._before[:3], time.thread_time())
        before, now = self._before, self._read()
        self._before = now
        seconds = max(1e-3, now[0] - before[0])
        memory, load = psutil.virtual_memory(), None
        if hasattr(psutil, "getloadavg"):
            load = psutil.getloadavg()[0]
        return Sample(
            cores=tuple(_busy(*pair) for pair in zip(before[1], now[1], strict=True)),
            process=100 * (now[2] - before[2]) / seconds,
            viewer=100 * (now[3] - before[3]) / seconds,
            resident=self._process.memory_info().rss,
            memory_used=memory.total - memory.available,
            memory_total=memory.total,
            load=load,
            gpus=tuple(self._gpu(i) for i in range(self._nvml.nvmlDeviceGetCount())) if self._nvml else (),
        )

    def _read(self) -> tuple[float, list, float, float]:
        times = self._process.cpu_times()
        return time.monotonic(), psutil.cpu_times(percpu=True), times.user + times.system, time.thread_time()

    def _gpu(self, index: int) -> Gpu:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)

        def ask(name: str, *args: Any) -> Any:
            try:
                return getattr(nvml, name)(handle, *args)
            except nvml.NVMLError:
                return None

        name, rates = ask("nvmlDeviceGetName"), ask("nvmlDeviceGetUtilizationRates")
        memory, limit = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetEnforcedPowerLimit")
        power = ask("nvmlDeviceGetPowerUsage")
        return Gpu(
            name=name.decode() if isinstance(name, bytes) else name or f"GPU {index}",
            utilisation=None if rates is None else float(rates.gpu),
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            power=None if power is None else power / 1000,
            power_limit=None if limit is None else limit / 1000,
            clock=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            memory_clock=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            temperature=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        )


def _busy(before: Any, now: Any) -> float:
    """Percent of a core's time that was not idle."""
    total = sum(now) - sum(before)
    idle = now.idle - before.idle + getattr(now, "iowait", 0.0) - getattr(before, "iowait", 0.0)
    return max(0.0, min(100.0, 100 * (1 - idle / total))) if total > 0 else 0.0
