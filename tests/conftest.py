"""Settings for every test below: repeatable hypothesis runs, and one thread for tensors of a few numbers."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvlab",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("kvlab")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which nothing above does


@pytest.fixture(autouse=True)
def _same_random_numbers_and_one_thread() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a run in this process sets its own
