"""Runs read back from what they left on disk: the common input of reports and pictures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from kvlab.core import PoolCounters, PoolStats, StepRecord
from kvlab.errors import RecordError
from kvlab.lab.flat import flatten

SUMMARY = "summary.json"

_NESTED = ("pool", "counters")
_STEP = [each.name for each in dataclasses.fields(StepRecord) if each.name not in _NESTED]
_POOL = {  # column of steps.parquet: field of PoolStats
    "blocks_total": "blocks_total",
    "blocks_in_use": "blocks_in_use",
    "block_token_slots": "block_size",
    "tokens_in_use": "tokens_stored",
    "blocks_cached": "blocks_cached",
    "shared_blocks": "shared_blocks",
}
_COUNTERS = [each.name for each in dataclasses.fields(PoolCounters) if each.name != "merged_blocks"]
_FIELDS = ("name", "run_id", "status", "error", "config", "choices", "metrics", "tags")


@dataclass(frozen=True)
class RunRecord:
    """One run as it was recorded. What an older version of kvlab did not write is empty, never an error."""

    name: str
    run_id: str | None  # in the tracking store; None for a run that was not tracked
    status: str  # a RunStatus: finished, failed, interrupted, out_of_memory
    error: str | None
    config: Mapping[str, object]  # flat dotted keys
    choices: Mapping[str, str]  # each group's choice: {"kv": "paged", ...}
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    directory: Path
    facts: Mapping[str, Any] = field(default_factory=dict)  # the summary's rest: machine, device, ...
    fetch: Callable[[], None] | None = None  # brings the files into `directory`, for a run of a tracking store

    @property
    def finished(self) -> bool:
        """Whether it ran to its end; only then its figures are those of the whole workload."""
        return self.status == "finished"

    def steps(self) -> list[StepRecord]:
        """The engine's steps in order, read when first asked for; none where the run kept none."""
        return self._steps

    def requests(self) -> list[dict[str, Any]]:
        """A row for each request and sample, as in requests.parquet, read when first asked for.

        Times are seconds since the run's start, or milliseconds where the name says so.
        """
        return self._requests

    @cached_property
    def _steps(self) -> list[StepRecord]:
        return [read_step(row) for row in self._read("steps.parquet")]

    @cached_property
    def _requests(self) -> list[dict[str, Any]]:
        return self._read("requests.parquet")

    @cached_property
    def _fetched(self) -> bool:
        if self.fetch is not None:
            self.fetch()
        return True

    def _read(self, name: str) -> list[dict[str, Any]]:
        return _rows(self.directory / name) if self._fetched else []


def step_row(step: StepRecord) -> dict[str, int | float | None]:
    """A step as a row of steps.parquet; what its engine does not have is None."""
    row = {name: getattr(step, name) for name in _STEP}
    row |= {column: getattr(step.pool, name, None) for column, name in _POOL.items()}
    return row | {name: getattr(step.counters, name, None) for name in _COUNTERS}


def read_step(row: Mapping[str, Any]) -> StepRecord:
    """The step of a row of steps.parquet. What an older version did not write is 0."""
    pool = {name: row.get(column) or 0 for column, name in _POOL.items()}
    counters = {name: row.get(name) or 0 for name in _COUNTERS}
    return StepRecord(
        **{name: row.get(name) or 0 for name in _STEP},
        pool=PoolStats(**pool) if row.get("blocks_total") is not None else None,
        counters=PoolCounters(**counters) if row.get("blocks_allocated") is not None else None,
    )


def read_run(directory: Path) -> RunRecord:
    """The run whose files are in `directory`. Raises RecordError where there is none, or none that can be read."""
    file = directory / SUMMARY
    if not file.is_file():
        raise RecordError(f"{directory}: no run's output directory, it has no {SUMMARY}")
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        config = summary.get("config")
        if config is None:
            config = _config(directory / "config.yaml")
        record = RunRecord(
            name=str(summary.get("name") or directory.name),
            run_id=summary.get("run_id"),
            status=str(summary.get("status", "finished")),
            error=summary.get("error"),
            config=config,
            choices=summary.get("choices") or {},
            metrics={key: float(value) for key, value in (summary.get("metrics") or {}).items()},
            tags=summary.get("tags") or _tags(config),
            directory=directory,
            facts={key: value for key, value in summary.items() if key not in _FIELDS},
        )
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise RecordError(f"{file}: cannot be read as a run's summary: {error}") from error
    return record


def read_sweep(directory: Path) -> list[RunRecord]:
    """The points of the sweep in `directory`, in the order they ran. Raises RecordError where there are none."""
    files = sorted(directory.glob(f"*/{SUMMARY}"), key=lambda file: (len(file.parent.name), file.parent.name))
    if not files:
        raise RecordError(f"{directory}: no sweep's directory, none of its folders has a {SUMMARY}")
    return [read_run(file.parent) for file in files]


def _config(file: Path) -> dict[str, object]:
    """The flat settings in a run's config.yaml; none for a run that was refused before it wrote one."""
    return flatten(yaml.safe_load(file.read_text(encoding="utf-8")) or {}) if file.is_file() else {}


def _tags(config: Mapping[str, object]) -> dict[str, str]:
    return {key.removeprefix("tags."): str(value) for key, value in config.items() if key.startswith("tags.")}


def _rows(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    import pyarrow
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise RecordError(f"{file}: cannot be read: {error}") from error
    return rows
