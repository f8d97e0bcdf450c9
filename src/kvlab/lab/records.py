"""Runs read back from what they left on disk: the common input of reports and figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import yaml

from kvlab.core import RequestRecord, StepRecord
from kvlab.errors import RecordError
from kvlab.kv.journal import BlockEvent, BlockEvents
from kvlab.lab.rows import read_request, read_step
from kvlab.lab.settings import flatten

SUMMARY, REQUESTS, STEPS, BLOCKS = "summary.json", "requests.parquet", "steps.parquet", "blocks.parquet"
BLOCK_EVENTS = [event.name.lower() for event in BlockEvent]  # in blocks.parquet

T = TypeVar("T")
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
    _known: dict[str, list[Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def finished(self) -> bool:
        """Whether it ran to its end; only then its figures are those of the whole workload."""
        return self.status == "finished"

    def steps(self) -> list[StepRecord]:
        """The engine's steps in order, read when first asked for; none where the run kept none."""
        return self._rows(STEPS, read_step)

    def requests(self) -> list[RequestRecord]:
        """What happened to each request and sample, read when first asked for."""
        return self._rows(REQUESTS, read_request)

    def blocks(self) -> BlockEvents | None:
        """What happened to each block, sequences as indices of `requests`; None where the run kept no journal."""
        table = self._read(BLOCKS)
        if table is None:
            return None
        names = table["event"].combine_chunks().dictionary_encode()
        number = np.array([BLOCK_EVENTS.index(name) for name in names.dictionary.to_pylist()], dtype=np.int8)
        return BlockEvents(
            step=table["step"].to_numpy(),
            event=number[names.indices.to_numpy()] if len(names) else np.empty(0, dtype=np.int8),
            block=table["block"].to_numpy(),
            sequence=table["sequence"].to_numpy(),
        )

    @cached_property
    def _fetched(self) -> bool:
        if self.fetch is not None:
            self.fetch()
        return True

    def _rows(self, name: str, read: Callable[[Mapping[str, Any]], T]) -> list[T]:
        if name not in self._known:
            table = self._read(name)
            self._known[name] = [] if table is None else [read(row) for row in table.to_pylist()]
        return self._known[name]

    def _read(self, name: str) -> Any:
        """A table of the run; None where it kept none. Raises RecordError for one that cannot be read."""
        file = self.directory / name
        if not self._fetched or not file.is_file():
            return None
        try:
            return pq.read_table(file)
        except (OSError, pyarrow.ArrowException) as error:
            raise RecordError(f"{file}: cannot be read: {error}") from error


def read_run(directory: Path) -> RunRecord:
    """The run whose files are in `directory`. Raises RecordError where there is none, or none that can be read."""
    file = directory / SUMMARY
    if not file.is_file():
        raise RecordError(f"{directory}: no run's output directory, it has no {SUMMARY}")
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        config, settings = summary.get("config"), directory / "config.yaml"
        if config is None:  # an older version's, or refused before it wrote one
            config = flatten(yaml.safe_load(settings.read_text("utf-8")) or {}) if settings.is_file() else {}
        tags = {key[5:]: str(value) for key, value in config.items() if key.startswith("tags.")}
        return RunRecord(
            name=str(summary.get("name") or directory.name),
            run_id=summary.get("run_id"),
            status=str(summary.get("status", "finished")),
            error=summary.get("error"),
            config=config,
            choices=summary.get("choices") or {},
            metrics={key: float(value) for key, value in (summary.get("metrics") or {}).items()},
            tags=summary.get("tags") or tags,
            directory=directory,
            facts={key: value for key, value in summary.items() if key not in _FIELDS},
        )
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise RecordError(f"{file}: cannot be read as a run's summary: {error}") from error


def read_sweep(directory: Path) -> list[RunRecord]:
    """The points of the sweep in `directory`, in the order they ran. Raises RecordError where there are none."""
    files = sorted(directory.glob(f"*/{SUMMARY}"), key=lambda file: (len(file.parent.name), file.parent.name))
    if not files:
        raise RecordError(f"{directory}: no sweep's directory, none of its folders has a {SUMMARY}")
    return [read_run(file.parent) for file in files]
