"""Tracking stores for tests: an empty one that costs a copy, and a run in one."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvlab.config import TrackingConfig
from kvlab.lab.tracking import MlflowTracker, open_store, start_run
from kvlab.workloads.describe import WorkloadFacts
from tests.support.isolation import SESSION


@cache
def empty_store() -> bytes:
    """The file of an SQLite store without a run: MLflow takes seconds to make one, once in a session."""
    file = Path(os.environ[SESSION]) / "empty_store.db"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            made = file.with_name("made.db")
            open_store(TrackingConfig(uri=f"sqlite:///{made}"), file.parent, create=True)
            made.rename(file)
    return file.read_bytes()


def start(
    root: Path,
    *,
    params: dict[str, Any] | None = None,
    tags: dict[str, str] | None = None,
    parent: str | None = None,
    facts: dict[str, str] | None = None,
    workload: WorkloadFacts | None = None,
    **settings: Any,
) -> MlflowTracker:
    """A run in the store of `root`, or in that which the settings of TrackingConfig name."""
    config = TrackingConfig(**{"timeout_s": 10.0} | settings)
    tracker = start_run(
        config,
        root=root,
        run_name="a run",
        params=params or {},
        tags=tags or {},
        parent_run_id=parent,
        facts=facts,
        workload=workload,
    )
    assert isinstance(tracker, MlflowTracker)
    return tracker
