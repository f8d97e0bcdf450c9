"""How many threads the processor's work is shared among: the cores that this process may really use."""

import math
import os
from pathlib import Path
from typing import NamedTuple

from kvlab.errors import ConfigError

_LEAST_GAIN = 1.1  # of the cores that a limit leaves over those of whole threads, to be worth a further thread


class Cores(NamedTuple):
    """What a process may use of a machine, its affinity and its container's limit taken into account."""

    physical: int
    logical: int  # hardware threads; more than `physical` where a core runs two


def resolve_threads(setting: int | None, ranks: int = 1) -> int:
    """`executor.threads`, or where it is null as many as PyTorch is set to (`OMP_NUM_THREADS`, all cores), but at
    most one to a physical core: a second on it makes all others wait. A part of a core that a container's limit
    leaves is worth a thread where it adds a tenth. So many `ranks` share the cores: the threads are those of each.

    Raises ConfigError for more threads than hardware threads, and for more ranks.
    """
    cores = usable_cores()
    if ranks > cores.logical:
        text = f"is more ranks than the {cores.logical} cores that this process may use; at most one to a core"
        raise ConfigError("executor.tensor_parallel", ranks, f"{text}: {cores.logical} would do")
    if setting is None:
        import torch  # this late: other figures of this module do not need it

        return max(1, min(torch.get_num_threads(), cores.physical // ranks))
    if setting * ranks > cores.logical and ranks > 1:
        text = f"each of executor.tensor_parallel={ranks} ranks has so many, and they share {cores.logical} cores"
        raise ConfigError("executor.threads", setting, f"{text}; {cores.logical // ranks}, or null, would do")
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
    # Threads beyond the limit are stopped together for a part of each period, but compute up to the limit.
    worth = math.ceil(limit / _LEAST_GAIN)
    return Cores(max(1, min(cores.physical, worth)), max(1, min(cores.logical, math.ceil(limit))))


def visible_cores(system: Path = Path("/")) -> Cores:
    """The cores that this process may run on, which a container's limit does not reduce."""
    everywhere = range(os.cpu_count() or 1)
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(everywhere)
    siblings = {_read(system / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus}
    return Cores(len(cpus) if None in siblings else len(siblings), len(cpus))


def explain_threads(setting: int | None, threads: int, system: Path = Path("/")) -> str:
    """Why there are so many `threads`, where it is not one for each core of the machine; else nothing."""
    if setting is not None:
        return "executor.threads"
    usable, visible, limit = usable_cores(system), visible_cores(system), _container_limit(system)
    if threads < usable.physical:
        return "as PyTorch is set to: OMP_NUM_THREADS"
    if limit is not None and usable.physical < visible.physical:
        return f"a quota of {limit:.3g} of {visible.physical} cores"
    machine = os.cpu_count() or 1
    return f"{visible.logical} of {machine} cores allowed" if visible.logical < machine else ""


def _container_limit(system: Path) -> float | None:
    """The tightest limit on CPU time, in cores, of the control groups (version 2, or 1) that this process is in."""
    limits = []
    for line in (_read(system / "proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = system / "sys/fs/cgroup" / ("cpu" if controllers else "")  # version 2 names no controllers
        for parent in (Path(group), *Path(group).parents):
            folder = root / parent.relative_to("/")
            limits.append((_read(folder / "cpu.max") or "").split())
            limits.append([_read(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")])
    quotas = [int(fields[0]) / int(fields[1]) for fields in limits if len(fields) == 2 and fields[0].isdigit()]
    return min(quotas, default=None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
