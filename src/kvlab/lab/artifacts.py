"""Writing a run's files: summary, requests, steps, settings, and blocks where its engine kept a journal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvlab.kv.journal import BlockEvents
from kvlab.lab import records
from kvlab.lab.drive import RunLog


def write_artifacts(directory: Path, log: RunLog, summary: dict[str, Any], config_yaml: str) -> None:
    """Write a run's files into `directory`, which is made. Times are seconds since the run's start, or `_ms`."""
    write_summary(directory, summary)
    (directory / "config.yaml").write_text(config_yaml, encoding="utf-8")
    _write(directory / records.REQUESTS, map(records.request_row, log.records), records.REQUEST_SCHEMA)
    _write(directory / records.STEPS, map(records.step_row, log.steps), records.STEP_SCHEMA)
    if log.blocks is not None:
        write_blocks(directory, log.blocks)


def write_summary(directory: Path, summary: dict[str, Any]) -> None:
    """Write summary.json alone."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary, indent=2, sort_keys=True, default=str)
    (directory / records.SUMMARY).write_text(text + "\n", encoding="utf-8")


def write_blocks(directory: Path, events: BlockEvents) -> None:
    """Write a run's block events: `step`, `block`, `event` by name, and the `sequence` whose reference it was as
    its row in requests.parquet, -1 for none.
    """
    names = pa.DictionaryArray.from_arrays(pa.array(events.event), pa.array(records.BLOCK_EVENTS))
    columns = {"step": events.step, "block": events.block, "event": names, "sequence": events.sequence}
    pq.write_table(pa.table(columns), directory / records.BLOCKS)


def _write(file: Path, rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), file)
