"""What the machine has: device, memory, processor."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path

import psutil
import torch


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
    host = f"{_processor()}, {cores} cores, {memory:.0f} GiB"
    return f"{torch.cuda.get_device_name()} ({host})" if device == "cuda" else host


def _processor() -> str:
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
