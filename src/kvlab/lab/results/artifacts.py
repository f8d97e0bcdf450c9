"""Writing a run's files: summary, requests, steps, settings, and blocks where its engine kept a journal."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvlab.errors import OutputError
from kvlab.kv.journal import BlockEvents
from kvlab.lab.files import attempt, replacing, write_text
from kvlab.lab.results import records
from kvlab.lab.results.fleet import prefixes_table, pulled_tokens, routes_table
from kvlab.lab.run.drive import RunLog


def write_artifacts(directory: Path, log: RunLog, summary: dict[str, Any], config_yaml: str) -> list[OutputError]:
    """Write a run's files into `directory`, which is made. Times are seconds since the run's start, or `_ms`.

    Each is tried, whatever became of the others. Returns why some could not be written.
    """
    pulled = None if log.pulls is None else pulled_tokens(log.pulls)
    writers: list[Callable[[], None]] = [
        partial(write_summary, directory, summary),
        partial(write_text, directory / "config.yaml", config_yaml),
        lambda: _write_table(
            directory / records.REQUESTS,
            records.request_table(log.records, log.engine_report, log.replica_names, pulled),
        ),
    ]
    if log.engine_report is None:
        writers.append(lambda: _write_table(directory / records.STEPS, records.step_table(log.steps)))
    elif log.engine_report.series.columns:
        series = log.engine_report.series
        writers.append(lambda: _write_table(directory / records.SERIES, records.series_table(series)))
    if log.routed:
        writers.append(lambda: _write_table(directory / records.ROUTES, routes_table(log.routed)))
    if log.holdings is not None and log.holdings.history:
        prefixes = prefixes_table(log.holdings)
        writers.append(lambda: _write_table(directory / records.PREFIXES, prefixes))
    if log.scaled:
        scaled = pa.Table.from_pylist([event._asdict() for event in log.scaled])
        writers.append(lambda: _write_table(directory / records.SCALED, scaled))
    if log.blocks is not None:
        writers.append(partial(write_blocks, directory, log.blocks))
    errors: list[OutputError] = []
    for write in writers:
        with attempt(errors):
            write()
    return errors


def write_summary(directory: Path, summary: dict[str, Any]) -> None:
    """Write summary.json alone. Raises OutputError."""
    text = json.dumps(summary, indent=2, sort_keys=True, default=str)
    write_text(directory / records.SUMMARY, text + "\n")


def write_blocks(directory: Path, events: BlockEvents) -> None:
    """Write a run's block events: `step`, `block`, `event` by name, and the `sequence` whose reference it was as
    its row in requests.parquet, -1 for none. Raises OutputError.
    """
    names = pa.DictionaryArray.from_arrays(pa.array(events.event), pa.array(records.BLOCK_EVENTS))
    columns = {"step": events.step, "block": events.block, "event": names, "sequence": events.sequence}
    _write_table(directory / records.BLOCKS, pa.table(columns))


def _write_table(file: Path, table: pa.Table) -> None:
    with replacing(file) as own:
        pq.write_table(table, own)
