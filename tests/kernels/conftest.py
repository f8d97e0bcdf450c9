"""Kernel tests need torch, triton and pytest alone, and run on a GPU where there is one:

pytest --confcutdir=tests/kernels -p no:cacheprovider tests/kernels
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import pytest
import torch

from kvlab.errors import KernelError
from kvlab.kernels.cpu.native import instruction_set, int8_path, load
from tests.kernels.grids import seed

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported

# AddressSanitizer's is in this process by now, and would take the compiler a third of its time.
if "libasan" in os.environ.get("LD_PRELOAD", ""):
    del os.environ["LD_PRELOAD"]

collect_ignore_glob = [] if find_spec("triton") else ["test_*"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run: a GPU, or the interpreter's CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


#: What kernels can be built for beside this machine's own: AVX2 alone, and neither AVX2 nor AVX-512.
ARCHITECTURES = ("x86-64-v3", "x86-64")
# One with a small first cache, one with a large one, whatever this machine's own is.
_FIRST_CACHE = {"x86-64-v3": "-UKVLAB_FIRST_CACHE_KB -DKVLAB_FIRST_CACHE_KB=32", "x86-64": "-UKVLAB_FIRST_CACHE_KB"}
# Those compile in two thirds of the time so. `make test-avx2` tests AVX2 with the usual flags.
_FLAGS = f"-O1 {os.environ.get('KVLAB_CXXFLAGS', '')}"
_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]


@pytest.fixture(params=["native", *_SLOW])
def cpu_architecture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What native kernels are built for: this machine, or what KVLAB_CPU_ARCH says it is; and what has fewer
    instructions.
    """
    name: str = request.param
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    own = instruction_set(), int8_path()
    if name != "native":
        if os.uname().machine != "x86_64":
            pytest.skip("not an x86 machine")
        build_for(name, monkeypatch)
        try:
            load()
        except KernelError as error:
            if "which this processor has not" not in str(error):  # what does not compile is to be seen
                raise
            pytest.skip(str(error))
        if (instruction_set(), int8_path()) == own:
            pytest.skip(f"native kernels use {own[0]} already")
    return name


def build_for(architecture: str, patch: pytest.MonkeyPatch) -> None:
    """Have kernels built for another machine than this one."""
    patch.setenv("KVLAB_CPU_ARCH", architecture)
    patch.setenv("KVLAB_CXXFLAGS", f"{_FLAGS} {_FIRST_CACHE.get(architecture, '')}".strip())


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    seed(0)
