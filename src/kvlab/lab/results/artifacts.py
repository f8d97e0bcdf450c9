"""Writing a run's files: summary, requests, steps, settings, and blocks where its engine kept a journal."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvlab import run_files
from kvlab.errors import OutputError
from kvlab.lab.files import attempt, replacing, write_text
from kvlab.lab.results.columns import blocks_table, request_table, series_table, step_table
from kvlab.lab.results.fleet import prefixes_table, pulled_tokens, routes_table
from kvlab.lab.results.log import RunLog


def write_artifacts(directory: Path, log: RunLog, summary: dict[str, Any], config_yaml: str) -> list[OutputError]:
    """Write a run's files into `directory`, which is made. Times are seconds since the run's start, or `_ms`.

    Each is tried, whatever became of the others. Returns why some could not be written.
    """
    fleet, report = log.fleet, log.engine_report
    names, pulls = ([], None) if fleet is None else (fleet.names, fleet.pulls)
    pulled = None if pulls is None else pulled_tokens(pulls)
    tables: dict[str, Callable[[], pa.Table]] = {}
    tables[run_files.REQUESTS] = partial(request_table, log.records, report, names, pulled)
    if report is None:
        tables[run_files.STEPS] = partial(step_table, log.steps)
    elif report.series.columns:
        tables[run_files.SERIES] = partial(series_table, report.series)
    if fleet is not None:
        if fleet.routed:
            tables[run_files.ROUTES] = partial(routes_table, fleet.routed)
        if fleet.holdings is not None and fleet.holdings.history:
            tables[run_files.PREFIXES] = partial(prefixes_table, fleet.holdings)
        if fleet.scaled:
            tables[run_files.SCALED] = lambda: pa.Table.from_pylist([event._asdict() for event in fleet.scaled])
    if log.blocks is not None:
        tables[run_files.BLOCKS] = partial(blocks_table, log.blocks)
    errors: list[OutputError] = []
    with attempt(errors):
        write_summary(directory, summary)
    with attempt(errors):
        write_text(directory / run_files.CONFIG, config_yaml)
    for name, make in tables.items():
        with attempt(errors), replacing(directory / name) as own:
            pq.write_table(make(), own)
    return errors


def write_summary(directory: Path, summary: dict[str, Any]) -> None:
    """Write summary.json alone. Raises OutputError."""
    write_text(directory / run_files.SUMMARY, json.dumps(summary, indent=2, sort_keys=True, default=str) + "\n")
