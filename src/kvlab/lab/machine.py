"""What the machine has: device, memory, processor."""

import math
import os
import platform
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from kvlab.engine.threads import visible_cores

_SLACK_CORES = 0.3  # that small things take on any machine


def available_memory(device: str) -> int:
    """Bytes that a run may still take on the device, a container's limit included."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no control group, or "max"
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        available = min(available, max(0, limit - used))
    return available


def total_memory() -> int:
    """Bytes of main memory."""
    return int(psutil.virtual_memory().total)


def peak_memory() -> int:
    """The most bytes of memory that this process has had in use."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe(device: str) -> str:
    """Device, cores and memory in a line."""
    memory = total_memory() / 2**30
    host = f"{processor()}, {visible_cores().logical} cores, {memory:.0f} GiB"
    if device == "cpu":
        return host
    import torch

    return f"{torch.cuda.get_device_name()} ({host})"


class CpuWatch:
    """How much of the processor other processes use from now on, that of number `own_pid` left out."""

    def __init__(self, own_pid: int | None = None) -> None:
        self._own_pid = own_pid
        self._start = time.monotonic()
        self._others = self._others_seconds()

    def busy_cores(self, least_s: float = 0.2) -> float:
        """The mean number of hardware threads that were busy with other processes, of those that this process may
        use; what a hypervisor took away counts too. Waits until `least_s` have passed.
        """
        time.sleep(max(0.0, self._start + least_s - time.monotonic()))
        return max(0.0, self._others_seconds() - self._others) / (time.monotonic() - self._start)

    def _others_seconds(self) -> float:
        """Seconds of the usable hardware threads that went to others since the machine started."""
        every = psutil.cpu_times(percpu=True)
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
        spare = ("idle", "iowait", "guest", "guest_nice")  # a guest's time is in user already
        used = [times._asdict() for cpu, times in enumerate(every) if cpu in cpus]
        busy = sum(float(value) for times in used for name, value in times.items() if name not in spare)
        own = psutil.Process().cpu_times()  # a compiler's is in the children's
        busy -= own.user + own.system + own.children_user + own.children_system
        with suppress(psutil.NoSuchProcess):
            if self._own_pid is not None:
                beside = psutil.Process(self._own_pid).cpu_times()
                busy -= beside.user + beside.system
        return busy


def oversubscription(threads: int, busy: float) -> str | None:
    """A warning where this process's `threads` and others that keep `busy` cores busy have to share, else None."""
    cores = visible_cores().physical
    if busy + threads <= cores + _SLACK_CORES:
        return None
    fewer = max(1, math.floor(cores - busy + _SLACK_CORES))
    advice = "wait until they are done"
    if fewer < threads:
        advice = f"executor.threads={fewer} leaves cores for other processes"
    return (
        f"{threads} thread{'s' * (threads > 1)} of this run and other processes that keep {busy:.1f} busy share "
        f"{cores} cores: they will wait for each other, and the figures will say little about speed; {advice}"
    )


def processor() -> str:
    """The processor's name, as its maker gives it where that can be found out."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
