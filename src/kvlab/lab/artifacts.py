"""What a run leaves on disk, and reads back: summary.json, requests.parquet, steps.parquet, config.yaml, and
blocks.parquet where it kept a journal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvlab.core import Sequence
from kvlab.lab.block_log import write_blocks
from kvlab.lab.drive import RunLog
from kvlab.lab.records import step_row

_REQUEST_TYPES: dict[str, pa.DataType] = {
    "request_id": pa.string(),
    "sample": pa.int64(),
    "arrival_s": pa.float64(),
    "prompt_tokens": pa.int64(),
    "cached_tokens": pa.int64(),
    "output_token_ids": pa.list_(pa.int64()),
    "finish_reason": pa.string(),
    "error": pa.string(),
    "scheduled_s": pa.float64(),
    "first_token_s": pa.float64(),
    "end_s": pa.float64(),
    "queue_ms": pa.float64(),
    "ttft_ms": pa.float64(),
    "tpot_ms": pa.float64(),
    "e2el_ms": pa.float64(),
    "preemptions": pa.int64(),
    "recomputed_tokens": pa.int64(),
    "token_times_s": pa.list_(pa.float64()),
    "preempted_s": pa.list_(pa.float64()),
    "resumed_s": pa.list_(pa.float64()),
}


def write_artifacts(directory: Path, log: RunLog, summary: dict[str, Any], config_yaml: str) -> None:
    """Write a run's files into `directory`, which is made if it is not there. Times are in seconds since the
    run's start unless the name says milliseconds.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_summary(directory, summary)
    (directory / "config.yaml").write_text(config_yaml, encoding="utf-8")
    rows = request_rows(log)
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(_REQUEST_TYPES)), directory / "requests.parquet")
    steps = [step_row(step) for step in log.steps]
    pq.write_table(pa.Table.from_pylist(steps), directory / "steps.parquet")
    if log.journal is not None:
        row_of = {id(sequence): row for row, sequence in enumerate(log.sequences)}
        tenants = [row_of.get(id(tenant), -1) for tenant in log.journal.tenants]
        write_blocks(directory, log.journal.columns(), tenants)


def request_rows(log: RunLog) -> list[dict[str, Any]]:
    """A row for each request and sample."""
    return [_request_row(sequence) for sequence in log.sequences]


def write_summary(directory: Path, summary: dict[str, Any]) -> None:
    """Write summary.json alone."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary, indent=2, sort_keys=True, default=str)
    (directory / "summary.json").write_text(text + "\n", encoding="utf-8")


def _request_row(sequence: Sequence) -> dict[str, Any]:
    arrival, times = sequence.request.arrival_s, sequence.token_times_s

    def since_arrival(when: float | None) -> float | None:
        return None if when is None else (when - arrival) * 1000

    several = len(times) > 1
    return {
        "request_id": sequence.request.request_id,
        "sample": sequence.index,
        "arrival_s": arrival,
        "prompt_tokens": sequence.num_prompt_tokens,
        "cached_tokens": sequence.cached_tokens,
        "output_token_ids": sequence.output_token_ids,
        "finish_reason": sequence.finish_reason,
        "error": sequence.error,
        "scheduled_s": sequence.scheduled_s,
        "first_token_s": times[0] if times else None,
        "end_s": sequence.finished_s,
        "queue_ms": since_arrival(sequence.scheduled_s),
        "ttft_ms": since_arrival(times[0] if times else None),
        "tpot_ms": (times[-1] - times[0]) * 1000 / (len(times) - 1) if several else None,
        "e2el_ms": since_arrival(sequence.finished_s),
        "preemptions": sequence.preemptions,
        "recomputed_tokens": sequence.recomputed_tokens,
        "token_times_s": times,
        "preempted_s": sequence.preempted_s,
        "resumed_s": sequence.resumed_s,
    }
