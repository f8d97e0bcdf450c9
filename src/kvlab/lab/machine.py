"""What the machine has: device, memory, processor."""

from __future__ import annotations

import math
import os
import platform
import resource
import sys
import time
from pathlib import Path

import psutil
import torch

from kvlab.engine.threads import visible_cores

_SLACK_CORES = 0.3  # that small things take on any machine


def available_memory(device: str) -> int:
    """Bytes that a run may still take on the device, a container's limit included."""
    if device == "cuda":
        free: int = torch.cuda.mem_get_info()[0]
        return free
    available = psutil.virtual_memory().available
    limit, used = (_cgroup(name) for name in ("memory.max", "memory.current"))
    return available if limit is None or used is None else min(available, max(0, limit - used))


def peak_memory() -> int:
    """The most bytes of memory that this process has had in use."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe(device: str) -> str:
    """Device, cores and memory in a line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory().total / 2**30
    host = f"{processor()}, {cores} cores, {memory:.0f} GiB"
    return f"{torch.cuda.get_device_name()} ({host})" if device == "cuda" else host


class CpuWatch:
    """How much of the processor others use, while this process does something else."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._others = _others_seconds()

    def busy_cores(self, least_s: float = 0.2) -> float:
        """Hardware threads, on average, that were busy with other processes since this watch was made, of those
        that this process may use; what a hypervisor took away counts too. Waits until `least_s` have passed.
        """
        time.sleep(max(0.0, self._start + least_s - time.monotonic()))
        return max(0.0, _others_seconds() - self._others) / (time.monotonic() - self._start)


def oversubscription(threads: int, busy: float) -> str | None:
    """What to say where this process's `threads` and those that keep `busy` cores busy have to share, else None."""
    cores = visible_cores().physical
    if busy + threads <= cores + _SLACK_CORES:
        return None
    fewer = max(1, math.floor(cores - busy + _SLACK_CORES))
    advice = f"executor.threads={fewer} leaves the others theirs" if fewer < threads else "wait until they are done"
    return (
        f"{threads} thread{'s' * (threads > 1)} of this run and other processes that keep {busy:.1f} busy share "
        f"{cores} cores: they will wait for each other, and the figures will say little about speed; {advice}"
    )


def _others_seconds() -> float:
    """Seconds of the usable hardware threads that went to others than this process since the machine started."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    every = psutil.cpu_times(percpu=True)
    # Without idle time; a guest's is in user already.
    spare = ("idle", "iowait", "guest", "guest_nice")
    busy = 0.0
    for cpu in cpus & set(range(len(every))):
        busy += sum(value for name, value in every[cpu]._asdict().items() if name not in spare)
    own = psutil.Process().cpu_times()  # a compiler's is in the children's
    return busy - float(own.user + own.system + own.children_user + own.children_system)


def processor() -> str:
    """The processor's name, as its maker gives it where that can be found out."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cgroup(name: str) -> int | None:
    try:
        return int((Path("/sys/fs/cgroup") / name).read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
