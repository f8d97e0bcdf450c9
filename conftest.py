"""Tests in several processes, `pytest -n 2`: they share the cores, and what each would have to make for itself."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # ahead of torch, which reads it as it is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Build the native kernels once, before the workers start."""
    if getattr(session.config.option, "numprocesses", None) and not hasattr(session.config, "workerinput"):
        from kvlab.errors import KernelError
        from kvlab.kernels.cpu.native import load

        with suppress(KernelError):
            load()
