"""Kernel tests need torch, triton and pytest alone, and run on a GPU where there is one:

pytest --confcutdir=tests/kernels -p no:cacheprovider tests/kernels
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from importlib.util import find_spec
from itertools import combinations
from typing import Any

import pytest
import torch

from kvlab.errors import KernelError
from kvlab.kernels.cpu.native import instruction_set, load

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported

collect_ignore_glob = [] if find_spec("triton") else ["test_*"]


@pytest.hookimpl(trylast=True)  # behind -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For the architecture that this machine uses, run all cases of each grid. For the others, run so many that
    each pair of two settings' values is among them. `KVLAB_KERNEL_CASES`: `all` cases, or `pairs`, for every one.
    """
    which = os.environ.get("KVLAB_KERNEL_CASES")
    if which == "all":
        return
    grids: defaultdict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        architecture = _params(item).get("cpu_architecture", "native")
        grids[item.nodeid.partition("[")[0], architecture].append(item)
    kept = {
        item
        for (_, architecture), grid in grids.items()
        for item in (_with_each_pair(grid) if architecture != "native" or which == "pairs" else grid)
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _params(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _with_each_pair(grid: list[pytest.Item]) -> list[pytest.Item]:
    """Few of a grid's cases, which have each pair of two settings' values: again and again the case with the
    most pairs that no chosen one has.
    """
    if len(grid) == 1:
        return grid
    pairs = {
        item: set(combinations(sorted((name, str(value)) for name, value in _params(item).items()), 2))
        for item in grid
    }
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(grid, key=lambda item: len(pairs[item] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run: a GPU, or the interpreter's CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


#: What kernels can be built for beside this machine's own: AVX2 alone, and neither AVX2 nor AVX-512.
ARCHITECTURES = ("x86-64-v3", "x86-64")
_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]


@pytest.fixture(params=["native", *_SLOW])
def cpu_architecture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What native kernels are built for: this machine, or what KVLAB_CPU_ARCH says it is; and what has fewer
    instructions.
    """
    name: str = request.param
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    own = instruction_set()
    if name != "native":
        if os.uname().machine != "x86_64":
            pytest.skip("not an x86 machine")
        monkeypatch.setenv("KVLAB_CPU_ARCH", name)
        try:
            load()
        except KernelError as error:  # this processor lacks its instructions
            pytest.skip(str(error))
        if instruction_set() == own:
            pytest.skip(f"native kernels use {own} already")
    return name


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
