"""How many threads the processor's work is shared among: the cores that this process may really use."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import torch

from kvlab.errors import ConfigError


class Cores(NamedTuple):
    """What a process may use of a machine, its affinity and its container's limit taken into account."""

    physical: int
    logical: int  # hardware threads; more than `physical` where a core runs two


def resolve_threads(setting: int | None) -> int:
    """`executor.threads`, or where it is null as many as PyTorch is set to (`OMP_NUM_THREADS`, all cores), but at
    most one to a physical core: a second on it, or one that the container's limit stops, makes all others wait.

    Raises ConfigError for more threads than hardware threads.
    """
    cores = usable_cores()
    if setting is None:
        return max(1, min(torch.get_num_threads(), cores.physical))
    if setting > cores.logical:
        raise ConfigError(
            "executor.threads",
            setting,
            f"is more than the {cores.logical} cores this process may use, so that threads would wait for each "
            f"other; executor.threads={cores.physical}, or null, would do",
        )
    return setting


def usable_cores(system: Path = Path("/")) -> Cores:
    """The cores that this process may use. `system` is the root of the files that Linux describes itself in; where
    there are none, every hardware thread counts as a core.
    """
    cores, limit = visible_cores(system), _container_limit(system)
    if limit is None:
        return cores
    # A part of a core is worth a thread only where there is no whole one.
    physical, logical = min(cores.physical, math.floor(limit)), min(cores.logical, math.ceil(limit))
    return Cores(max(1, physical), max(1, logical))


def visible_cores(system: Path = Path("/")) -> Cores:
    """The cores that this process may run on, which a container's limit does not reduce."""
    everywhere = range(os.cpu_count() or 1)
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(everywhere)
    siblings = {_read(system / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus}
    return Cores(len(cpus) if None in siblings else len(siblings), len(cpus))


def _container_limit(system: Path) -> float | None:
    """The tightest limit on CPU time, in cores, of the control groups (version 2, or 1) that this process is in."""
    group = Path("/")
    for line in (_read(system / "proc/self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            group = Path(line.removeprefix("0::"))
    limits = []
    for parent in (group, *group.parents):
        folder = system / "sys/fs/cgroup" / parent.relative_to("/")
        limits.append((_read(folder / "cpu.max") or "").split())
    old = system / "sys/fs/cgroup/cpu"
    limits.append([_read(old / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")])
    found = [int(fields[0]) / int(fields[1]) for fields in limits if len(fields) == 2 and fields[0].isdigit()]
    return min(found, default=None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
