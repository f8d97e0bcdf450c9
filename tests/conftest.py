"""Settings for every test below: repeatable hypothesis runs, and one thread for tensors of a few numbers."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.kernels.grids import seed

settings.register_profile(
    "kvlab",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("kvlab")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which nothing above does


@pytest.fixture
def no_requests_are_served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As it is when a process starts: the session of tests takes part in no serving."""
    from kvlab.engine import garbage

    before = gc.get_threshold()
    monkeypatch.setattr(garbage, "_users", 0)
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    yield
    gc.freeze()
    gc.set_threshold(*before)


@pytest.fixture(autouse=True)
def _same_random_numbers_and_one_thread() -> None:
    seed(0)
    torch.set_num_threads(1)  # a run in this process sets its own
