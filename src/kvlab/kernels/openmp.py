"""How long a thread that waits for others keeps its core.

libgomp, the OpenMP that PyTorch brings and the native kernels share, lets a waiting thread spin for 300,000 rounds,
4 ms and more, between two steps too. Beside other work that is time which the thread waited for needs. Where two
threads of a process have used it, as in a server, it is 100 rounds instead, and threads fall asleep that are needed
right away. With some 20 µs the others arrive in time where every thread has its core.
"""

import os
import platform
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

# A round is a `pause` on x86, 15 to 50 ns, and about one instruction elsewhere. `active` makes it 1,000 rounds
# where there are more threads than cores (libgomp/env.c, initialize_env).
BRIEF = {
    "OMP_WAIT_POLICY": "active",
    "GOMP_SPINCOUNT": "2000" if platform.machine().lower() in ("x86_64", "amd64") else "30000",
}


def wait_briefly() -> None:
    """Set it for this process, unless one of the variables is set. It has to come before torch: libgomp reads them
    when it is loaded, and has no call that changes them later. Another OpenMP would spin without end for `active`.
    """
    if "torch" not in sys.modules and not BRIEF.keys() & os.environ.keys() and _torch_brings_libgomp():
        os.environ |= BRIEF


def without_brief_waiting(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a program that is not kvlab: without what `wait_briefly` has set."""
    ours = all(environment.get(name) == value for name, value in BRIEF.items())
    return {name: value for name, value in environment.items() if not (ours and name in BRIEF)}


def _torch_brings_libgomp() -> bool:
    torch = find_spec("torch")
    folders = torch.submodule_search_locations if torch is not None else None
    return any(any(Path(folder, "lib").glob("libgomp*")) for folder in folders or ())
