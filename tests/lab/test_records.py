"""Files of a run, read back: those of today and those of older versions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvlab.cli.recorded import find_run, recorded_config
from kvlab.core import FinishReason, PoolCounters, PoolStats, StepRecord
from kvlab.core.step_log import StepLog
from kvlab.errors import ConfigError, RecordError
from kvlab.lab.results.artifacts import write_artifacts
from kvlab.lab.results.columns import read_step, request_row, request_table, step_table
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.records import read_run

#: The columns of steps.parquet as the first release wrote them.
FIRST: dict[str, Any] = {
    "index": 3,
    "start_s": 1.0,
    "end_s": 1.5,
    "running": 2,
    "waiting": 1,
    "batch_seqs": 2,
    "prefill_tokens": 8,
    "decode_tokens": 1,
    "recomputed_tokens": 4,
    "preempted": 1,
    "blocks_total": 10,
    "blocks_in_use": 6,
    "block_token_slots": 4,
    "tokens_in_use": 20,
    "blocks_cached": 2,
    "shared_blocks": 1,
    "blocks_allocated": 3,
    "blocks_freed": 2,
    "evictions": 1,
    "evicted_blocks": 2,
    "cow_copies": 1,
    "prompt_tokens": 8,
    "hit_tokens": 4,
    "same_step_hit_tokens": 0,
    "recompute_hit_tokens": 4,
    "schedule_ms": 0.5,
    "execute_ms": 499.5,
}
LATER: dict[str, Any] = {"failed_passes": 1, "sampled_tokens": 2, "context_tokens": 20, "attended_tokens": 40}


#: The columns of requests.parquet as the first release wrote them; the last four came later.
REQUEST: dict[str, Any] = {
    "request_id": "r0",
    "sample": 1,
    "arrival_s": 1.0,
    "prompt_tokens": 8,
    "cached_tokens": 4,
    "output_token_ids": [5, 6, 7],
    "finish_reason": "length",
    "error": None,
    "scheduled_s": 1.25,
    "first_token_s": 1.5,
    "end_s": 3.0,
    "queue_ms": 250.0,
    "ttft_ms": 500.0,
    "tpot_ms": 750.0,
    "e2el_ms": 2000.0,
    "preemptions": 1,
    "recomputed_tokens": 9,
    "token_times_s": [1.5, 2.0, 3.0],
    "preempted_s": [2.25],
    "resumed_s": [2.5],
    "prompt": "What is a block?",
    "text": "A block holds",
}


def write_run(directory: Path, rows: list[dict[str, Any]], name: str = "steps.parquet") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "summary.json").write_text(json.dumps({"name": "r", "metrics": {}, "config": {}}))
    pq.write_table(pa.Table.from_pylist(rows), directory / name)
    return directory


def test_a_request_keeps_its_columns_and_computes_its_latencies(tmp_path: Path) -> None:
    (record,) = read_run(write_run(tmp_path, [REQUEST], "requests.parquet")).requests()
    assert (record.key, record.name, record.finish_reason) == (("r0", 1), "r0 #1", FinishReason.LENGTH)
    assert record.itl_ms == (500.0, 1000.0)
    assert request_row(record) == {
        name: tuple(value) if isinstance(value, list) else value for name, value in REQUEST.items()
    } | {"salt": None, "replica": 0}
    assert list(request_row(record)) == [*REQUEST, "salt", "replica"]


def test_salts_and_what_is_kept_have_columns_where_there_is_any(tmp_path: Path) -> None:
    write_run(tmp_path, [REQUEST | {"salt": "ann"}], "requests.parquet")
    (record,) = read_run(tmp_path).requests()
    assert (record.salt, request_table([record])["salt"].to_pylist()) == ("ann", ["ann"])
    assert "replica" not in request_table([record]).column_names
    assert request_table([dataclasses.replace(record, replica=3)])["replica"].to_pylist() == [3]
    kept = FIRST | LATER | {"blocks_pinned": 2, "expired_blocks": 3, "quota_evictions": 0}
    (row,) = step_table(StepLog([read_step(kept)])).to_pylist()
    assert row == kept | {"pinned_evictions": 0, "pins_refused": 0}


def test_requests_of_an_older_file_are_read(tmp_path: Path) -> None:
    older = {name: value for name, value in REQUEST.items() if name not in ("sample", "preempted_s", "resumed_s")}
    (record,) = read_run(write_run(tmp_path, [older], "requests.parquet")).requests()
    assert (record.sample, record.preempted_s, record.ttft_ms, record.tpot_ms) == (0, (), 500.0, 750.0)


def test_files_are_written_with_their_columns_even_where_nothing_ran(tmp_path: Path) -> None:
    write_artifacts(tmp_path, RunLog(), {"metrics": {}}, "")
    assert set(pq.read_schema(tmp_path / "steps.parquet").names) == {*FIRST, *LATER}
    assert pq.read_schema(tmp_path / "requests.parquet").names == list(REQUEST)
    run = read_run(tmp_path)
    assert (list(run.steps()), run.requests(), run.blocks()) == ([], [], None)


def test_a_difference_of_counters_is_what_was_done_in_between() -> None:
    size = len(PoolCounters._fields)
    before = PoolCounters(*range(size))
    after = PoolCounters(*range(5, 5 + 2 * size, 2))
    assert after - before == tuple(range(5, 5 + size))


def test_a_step_keeps_its_flat_columns() -> None:
    assert step_table(StepLog([read_step(FIRST | LATER)])).to_pylist() == [FIRST | LATER]


def test_a_run_that_decodes_in_vain_has_a_column_of_it() -> None:
    step = FIRST | LATER | {"vain_tokens": 1}
    steps = StepLog([read_step(step)])
    assert step_table(steps).to_pylist() == [step]
    assert steps[0].output_tokens == 1


def test_a_run_that_proposes_tokens_has_columns_for_them(tmp_path: Path) -> None:
    speculated = FIRST | LATER | {"proposed_tokens": 7, "accepted_tokens": 3}
    steps = StepLog([read_step(FIRST | LATER), read_step(speculated)])
    assert step_table(steps).to_pylist() == [speculated | {"proposed_tokens": 0, "accepted_tokens": 0}, speculated]
    assert list(read_run(write_run(tmp_path, step_table(steps).to_pylist())).steps()) == list(steps)
    assert [each.output_tokens for each in steps] == [2, 2 - 7 + 3]


def test_steps_of_an_older_file_are_read(tmp_path: Path) -> None:
    (step,) = read_run(write_run(tmp_path, [FIRST])).steps()
    assert step.pool == PoolStats(4, 10, 6, 20, blocks_cached=2, shared_blocks=1)
    assert step.counters == PoolCounters(3, 2, 1, 2, 1, 0, 8, 4, 0, 4)
    assert (step.index, step.preempted, step.schedule_ms) == (3, 1, 0.5)
    assert (step.failed_passes, step.attended_tokens) == (0, 0)


def test_columns_that_this_version_does_not_know_are_passed_over(tmp_path: Path) -> None:
    (step,) = read_run(write_run(tmp_path, [FIRST | LATER | {"of_a_later_version": 1}])).steps()
    assert step.attended_tokens == 40


def test_an_engine_without_blocks_has_none_in_its_file(tmp_path: Path) -> None:
    step = StepRecord(0, 0.0, 1.0, running=1, waiting=0, batch_seqs=1, prefill_tokens=3, decode_tokens=0)
    (row,) = step_table(StepLog([step])).to_pylist()
    assert (row["blocks_total"], row["blocks_allocated"], row["prefill_tokens"]) == (None, None, 3)
    assert read_run(write_run(tmp_path, [row])).steps() == [step]


def test_a_table_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    pq.write_table(pa.table({"request_id": ["r0"]}), tmp_path / "requests.parquet")
    with pytest.raises(
        RecordError, match=r"requests.parquet: cannot be read as a table of a run: has no 'arrival_s'"
    ):
        read_run(tmp_path).requests()


@pytest.mark.parametrize("other", ["", "{", "[]", '{"run_id": null}'])
def test_a_run_is_found_beside_summaries_that_cannot_be_read(tmp_path: Path, other: str) -> None:
    for name, text in (("a", other), ("b", '{"run_id": "ab12"}')):
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "summary.json").write_text(text)
    assert find_run("ab12", tmp_path) == tmp_path / "outputs" / "b"
    with pytest.raises(ConfigError, match="run=cd34: is no output directory"):
        find_run("cd34", tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("seed: [", "while parsing a flow node"),
        ("- seed", "has no settings of a run"),
        ("of_another_version: 1", "Key 'of_another_version' not in 'RunConfig'"),
        ("seed: many", "Value 'many' of type 'str' could not be converted to Integer"),
    ],
)
def test_settings_of_a_run_that_cannot_be_read_are_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(RecordError, match=f"config.yaml: .*{reason}"):
        recorded_config(tmp_path)
