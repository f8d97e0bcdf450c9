"""Figures of the pool, and those of a finished run compared with its step log."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.checkpoints import Checkpoint, random_tokens
from features.steps.server import Server
from features.steps.support import Memory, MemorySize, memory_size
from kvlab.config import SchedulerConfig
from kvlab.core import PoolCounters, PoolStats, Request, SamplingParams, StepRecord
from kvlab.kv.sizing import PoolSize
from kvlab.lab.results.artifacts import write_artifacts
from kvlab.lab.results.columns import step_table
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.metrics import run_metrics
from kvlab.lab.run.drive import drive

_SUMS = ("blocks_allocated", "blocks_freed", "evictions", "evicted_blocks", "cow_copies", "hit_tokens")
_TOTALS = (*_SUMS, "prompt_tokens", "same_step_hit_tokens", "recompute_hit_tokens")
_EVENTS = {
    "hits": "hit_tokens",
    "preemptions": "preempted",
    "evictions": "evicted_blocks",
    "copies": "cow_copies",
}


@dataclass
class FinishedRun:
    """A run's figures, its step log, and what the pool said after each of its steps."""

    metrics: dict[str, float]
    log: RunLog
    steps: list[dict[str, Any]]
    seen: list[PoolStats] = field(default_factory=list)


@given(parsers.parse("a clock on which each step takes {seconds:g} seconds"), target_fixture="step_s")
def step_seconds(seconds: float) -> float:
    return seconds


@given(
    parsers.re(r"a server with (?P<size>[\w ]+? tokens)(?P<sharing> that shares prefixes)?, on that clock"),
    converters={"size": memory_size, "sharing": bool},
    target_fixture="server",
)
def a_server_on_clock(
    model: Checkpoint, scheduling: SchedulerConfig, size: MemorySize, sharing: bool, step_s: float
) -> Server:
    return Server.start(model, size, replace(scheduling), sharing=sharing, step_s=step_s)


@when(
    parsers.re(
        r"a run of (?P<count>\d+) requests of (?P<prompt>\d+) prompt tokens"
        r"(?:, the first (?P<same>\d+) of which are the same,)? and (?P<output>\d+) output tokens"
        r"(?: in (?P<samples>\d+) samples)? is finished"
    ),
    target_fixture="run",
)
def a_run(
    server: Server, count: str, prompt: str, same: str | None, output: str, samples: str | None
) -> FinishedRun:
    alike = random_tokens(int(same or 0), seed=7)
    sampling = SamplingParams(int(output), temperature=1.0 if samples else 0.0, seed=3, n=int(samples or 1))
    requests = [
        Request(f"request-{index}", (*alike, *random_tokens(int(prompt) - len(alike), seed=100 + index)), sampling)
        for index in range(int(count))
    ]
    pool = server.memory.pool
    seen: list[PoolStats] = []

    def on_step(log: RunLog, record: StepRecord | None) -> None:
        assert pool.audit() == []
        if record is not None:
            seen.append(pool.stats())

    log = drive(server.engine, requests, on_step=on_step)
    size = PoolSize(pool.allocator.num_blocks, pool.block_size, server.memory.spec.bytes_per_token)
    metrics = run_metrics(log, size, leaked_blocks=0)
    return FinishedRun(metrics, log, step_table(log.steps).to_pylist(), seen)


@when("its files are written and read again")
def from_disk(run: FinishedRun, tmp_path: Path) -> None:
    write_artifacts(tmp_path, run.log, {"metrics": run.metrics}, "")
    rows = pq.read_table(tmp_path / "steps.parquet").to_pylist()
    assert rows == run.steps
    run.steps, run.metrics = rows, json.loads((tmp_path / "summary.json").read_text())["metrics"]


@then(parsers.parse("{used:d} blocks of the pool are in use, {percent:g} %"))
def utilisation(memory: Memory, used: int, percent: float) -> None:
    stats = memory.pool.stats()
    assert stats.blocks_in_use == used
    assert 100 * stats.block_utilization == pytest.approx(percent)


@then(parsers.parse("sharing saves {saved:d} blocks, and {cached:d} are cached"))
def saved_and_cached(memory: Memory, saved: int, cached: int) -> None:
    stats = memory.pool.stats()
    assert (stats.shared_blocks, stats.blocks_cached) == (saved, cached)


@then(parsers.parse("{unused:d} token slots of the blocks in use are unused, {percent:g} % of them"))
def fragmentation(memory: Memory, unused: int, percent: float) -> None:
    stats = memory.pool.stats()
    assert stats.blocks_in_use * stats.block_size - stats.tokens_stored == unused
    assert 100 * stats.internal_fragmentation == pytest.approx(percent, abs=1e-4)


@then(parsers.parse("{allocated:d} blocks were allocated and {freed:d} freed"))
def allocated_and_freed(memory: Memory, allocated: int, freed: int) -> None:
    done = memory.pool.counters()
    assert (done.blocks_allocated, done.blocks_freed) == (allocated, freed)


@then(parsers.parse("it took {seconds:g} seconds"))
def took(run: FinishedRun, seconds: float) -> None:
    assert run.metrics["duration_s"] == pytest.approx(seconds)


@then(parsers.parse("its figures say {allocated:d} blocks allocated, {per_second:g} a second, and as many freed"))
def says_allocated(run: FinishedRun, allocated: int, per_second: float) -> None:
    for what in ("allocated", "freed"):
        assert run.metrics[f"kv/blocks_{what}"] == allocated
        assert run.metrics[f"kv/blocks_{what}_per_s"] == pytest.approx(per_second, abs=1e-4)


@then("the figures about memory equal those recomputed from its step log")
def figures_from_log(run: FinishedRun) -> None:
    """Each by its formula in docs/metrics.md; the times are those of the requests."""
    busy = [step for step in run.steps if step["batch_seqs"]]
    time = [step["end_s"] - step["start_s"] for step in run.steps]
    duration = max(record.token_times_s[-1] for record in run.log.records)
    expected: dict[str, float] = {f"kv/{name}": sum(step[name] for step in run.steps) for name in _SUMS}
    expected["kv/prefix_hit_tokens"] = expected.pop("kv/hit_tokens")
    expected["kv/prefix_hit_rate"] = expected["kv/prefix_hit_tokens"] / sum(s["prompt_tokens"] for s in run.steps)
    for what in ("allocated", "freed"):
        expected[f"kv/blocks_{what}_per_s"] = expected[f"kv/blocks_{what}"] / duration
    used = [100 * step["blocks_in_use"] / step["blocks_total"] for step in run.steps]
    stored = [100 * s["tokens_in_use"] / (s["blocks_total"] * s["block_token_slots"]) for s in run.steps]
    # A step that only gave memory back counts like any other; without a block in use, nothing of it is used.
    unused = [
        100 * (1 - s["tokens_in_use"] / (s["blocks_in_use"] * s["block_token_slots"]))
        if s["blocks_in_use"]
        else 100
        for s in run.steps
    ]
    expected["kv/block_utilization_peak"] = max(used)
    expected["kv/block_utilization_mean"] = _weighted(used, time)
    expected["kv/token_utilization_mean"] = _weighted(stored, time)
    expected["kv/internal_fragmentation_mean"] = _weighted(unused, time)
    expected["kv/shared_blocks_peak"] = max(step["shared_blocks"] for step in run.steps)
    expected["capacity/peak_running"] = max(step["running"] for step in run.steps)
    expected["capacity/mean_running"] = _weighted([step["running"] for step in run.steps], time)
    expected["engine/steps"] = len(busy)
    assert {name: run.metrics[name] for name in expected} == pytest.approx(expected)


@then("each row of the step log says what the pool held in that step")
def rows_equal_pool(run: FinishedRun) -> None:
    for step, stats in zip(run.steps, run.seen, strict=False):  # the last step gives memory back after the run
        assert step["blocks_in_use"] == stats.blocks_in_use
        assert step["tokens_in_use"] == stats.tokens_stored
        assert (step["blocks_cached"], step["shared_blocks"]) == (stats.blocks_cached, stats.shared_blocks)
    assert len(run.seen) >= len(run.steps) - 1


@then("the sums of the step log are what the pool counted")
def sums_equal_pool(run: FinishedRun, server: Server) -> None:
    done = server.memory.pool.counters()
    assert set(PoolCounters._fields) >= set(_TOTALS)
    for name in _TOTALS:
        assert sum(step[name] for step in run.steps) == getattr(done, name), name
    assert done.blocks_allocated == done.blocks_freed > 0


@then(parsers.parse("the run saw {events}"))
def saw(run: FinishedRun, events: str) -> None:
    for event in events.split(", "):
        assert sum(step[_EVENTS[event]] for step in run.steps) > 0, event


def _weighted(values: list[float], weights: list[float]) -> float:
    return math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / math.fsum(weights)
