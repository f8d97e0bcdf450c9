"""The laboratory with an engine that has none of kvlab's parts: all it may know of one is ServingEngine."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from kvlab.config import RunConfig
from kvlab.core import FinishReason, Request, RequestRecord, SamplingParams, StepRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.clock import LogicalClock
from kvlab.engine.protocol import Auditable, EngineStats, FinishCallback, Journaled, ServingEngine
from kvlab.errors import ConfigError, EngineStoppedError
from kvlab.lab.compare.groups import RunSet
from kvlab.lab.figures import save_run_figures
from kvlab.lab.report.options import ReportOptions
from kvlab.lab.report.pages import add_figures, write_report
from kvlab.lab.report.report import build_report
from kvlab.lab.report.terminal import print_report
from kvlab.lab.results.artifacts import write_artifacts
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.metrics import run_metrics
from kvlab.lab.results.records import RunRecord, read_run
from kvlab.lab.run import progress
from kvlab.lab.run import serve as execution
from kvlab.lab.run.drive import drive
from kvlab.lab.run.trace import trace_events, write_trace
from kvlab.lab.terminal import Terminal
from kvlab.peers.engines import ENGINES
from kvlab.peers.engines.base import Assignment, EngineKind
from tests.support.runs import run_small


@dataclass(eq=False)
class Entry:
    request: Request
    on_finish: FinishCallback
    scheduled_s: float | None = None
    times: list[float] = field(default_factory=list)


class SlotEngine:
    """A token a second for each of `slots` requests at once. No cache, no model; `keeps_steps` or not."""

    def __init__(self, slots: int, *, keeps_steps: bool = True) -> None:
        self.clock, self.slots, self.keeps_steps = LogicalClock(), slots, keeps_steps
        self.entries: list[Entry] = []
        self.steps = 0

    def submit(self, request: Request, on_output: object = None, on_finish: FinishCallback | None = None) -> None:
        self.entries.append(Entry(request, on_finish or (lambda record: None)))

    def abort(self, request_id: str) -> bool:
        found = [entry for entry in self.entries if entry.request.request_id == request_id]
        for entry in found:
            self.end(entry, FinishReason.ABORTED)
        return bool(found)

    def step(self) -> StepRecord | None:
        start, batch, waiting = self.clock.now(), self.entries[: self.slots], len(self.entries[self.slots :])
        if not batch:
            return None
        self.clock.advance(1.0)
        new = [entry for entry in batch if not entry.times]
        for entry in batch:
            entry.scheduled_s = start if entry.scheduled_s is None else entry.scheduled_s
            entry.times.append(self.clock.now())
            if len(entry.times) == entry.request.sampling.max_tokens:
                self.end(entry, FinishReason.LENGTH)
        prefill, decode = sum(len(entry.request.prompt_token_ids) for entry in new), len(batch) - len(new)
        counts = len(batch), waiting, len(batch), prefill, decode
        record = StepRecord(self.steps, start, self.clock.now(), *counts)
        self.steps += 1
        return record if self.keeps_steps else None

    def end(self, entry: Entry, reason: FinishReason) -> None:
        self.entries.remove(entry)
        name, prompt, times = entry.request.request_id, len(entry.request.prompt_token_ids), tuple(entry.times)
        facts = (
            name,
            0,
            entry.request.arrival_s,
            prompt,
            tuple(range(len(times))),
            times,
            reason,
            self.clock.now(),
        )
        entry.on_finish(RequestRecord(*facts, scheduled_s=entry.scheduled_s))

    def has_work(self) -> bool:
        return bool(self.entries)

    def next_wakeup(self) -> float | None:
        return self.clock.now() if self.entries else None

    def stats(self) -> EngineStats:
        return EngineStats(len(self.entries[: self.slots]), len(self.entries[self.slots :]))

    def close(self) -> None:
        self.entries.clear()


def request(name: str, prompt: int, output: int, arrival_s: float = 0.0, follows: str | None = None) -> Request:
    return Request(name, tuple(range(prompt)), SamplingParams(output), arrival_s, follows=follows)


#: On two slots, by hand:   0   1   2   3   4   5   6   7 s
#:                          |a a a   |       |d|
#:                          |b b |c c|          (c waits from 0.5 to 2)
REQUESTS = [request("a", 4, 3), request("b", 5, 2), request("c", 6, 2, 0.5), request("d", 7, 1, 6.0)]
LATENCY = {
    "latency/ttft_ms_mean": (1000 + 1000 + 2500 + 1000) / 4,
    "latency/e2el_ms_mean": (3000 + 2000 + 3500 + 1000) / 4,
    "latency/queue_ms_p50": 0.0,
    "latency/queue_ms_mean": 1500 / 4,
    "latency/tpot_ms_p99": 1000.0,
    "latency/itl_ms_p50": 1000.0,
    "duration_s": 7.0,
    "throughput/output_tokens_per_s": 8 / 7,
    "throughput/total_tokens_per_s": (8 + 22) / 7,
    "throughput/requests_per_s": 4 / 7,
    "requests/completed": 4,
    "tokens/output": 8,
    "tokens/prompt": 22,
}
STEPS = {
    "engine/steps": 5,
    "engine/batch_seqs_mean": 8 / 5,
    "engine/batch_tokens_mean": (9 + 2 + 7 + 1 + 7) / 5,
    "engine/step_ms_p50": 1000.0,
    "capacity/peak_running": 2,
    "capacity/mean_running": 8 / 5,
    "tokens/prefill": 22,
}


def serve(directory: Path, slots: int = 2, *, keeps_steps: bool = True) -> RunRecord:
    """A run of REQUESTS, from the engine to the disk and back."""
    engine: ServingEngine = SlotEngine(slots, keeps_steps=keeps_steps)
    log = drive(engine, REQUESTS)
    summary = {"name": directory.name, "config": {"slots": slots}, "metrics": run_metrics(log)}
    write_artifacts(directory, log, summary, "")
    write_trace(directory / "trace.json", trace_events(directory.name, log.steps, log.records))
    return read_run(directory)


@pytest.mark.parametrize("keeps_steps", [True, False])
class TestAnEngineWithoutBlocks:
    def test_is_measured_as_computed_by_hand(self, tmp_path: Path, keeps_steps: bool) -> None:
        run = serve(tmp_path, keeps_steps=keeps_steps)
        expected = LATENCY | (STEPS if keeps_steps else {})
        assert {name: run.metrics[name] for name in expected} == pytest.approx(expected)
        assert not [name for name in run.metrics if name.startswith("kv/")]
        if not keeps_steps:
            groups = {name.partition("/")[0] for name in run.metrics}
            assert groups == {"duration_s", "latency", "load", "requests", "throughput", "tokens"}
            assert "requests/preemptions" not in run.metrics

    def test_leaves_its_records(self, tmp_path: Path, keeps_steps: bool) -> None:
        run = serve(tmp_path, keeps_steps=keeps_steps)
        assert [record.request_id for record in run.requests()] == ["a", "b", "c", "d"]
        assert run.requests()[2].token_times_s == (3.0, 4.0)
        assert len(run.steps()) == (5 if keeps_steps else 0)
        assert all(step.pool is None and step.counters is None for step in run.steps())
        assert run.blocks() is None

    def test_is_drawn_and_traced(self, tmp_path: Path, keeps_steps: bool) -> None:
        run = serve(tmp_path, keeps_steps=keeps_steps)
        assert {"timeline.png", "latency.png", "hover.html"} <= {file.name for file in save_run_figures(run)}
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert [event["args"]["output_tokens"] for event in events if event["ph"] == "b" and "args" in event] == [
            3, 2, 2, 1,
        ]  # fmt: skip
        assert len([event for event in events if event.get("cat") == "step"]) == (5 if keeps_steps else 0)
        assert not [event for event in events if event["name"] == "KV blocks"]

    def test_is_compared_with_another(self, tmp_path: Path, keeps_steps: bool) -> None:
        runs = [serve(tmp_path / str(n), slots=n, keeps_steps=keeps_steps) for n in (1, 2)]
        options = ReportOptions(by=["slots"])
        report = build_report([RunSet(run.name, (run,)) for run in runs], options)
        line = next(row for row in report.rows if row.metric == "duration_s")
        assert [cell.value for cell in line.cells] == ["8.00 s", "7.00 s"]
        console = Terminal(file=(shown := io.StringIO()), width=200)
        print_report(report, console)
        assert "whole request, p50" in shown.getvalue()
        add_figures(report)
        assert {image.name for image in report.images} >= {"timeline", "latency"}
        assert any("no memory: its steps have no blocks" in text for text in report.left_out)
        assert "7.00 s" in write_report(report, tmp_path).read_text()

    def test_is_aborted_when_the_run_is_interrupted(self, keeps_steps: bool) -> None:
        engine = SlotEngine(1, keeps_steps=keeps_steps)
        log = drive(engine, REQUESTS, should_stop=lambda: engine.clock.now() >= 2)
        assert log.interrupted
        assert [(r.name, r.finish_reason, len(r.token_times_s)) for r in log.records] == [
            ("a", FinishReason.ABORTED, 2),
            ("b", FinishReason.ABORTED, 0),
            ("c", FinishReason.ABORTED, 0),
        ]
        metrics = run_metrics(log)
        assert (metrics["requests/completed"], metrics["tokens/prompt"], metrics["tokens/output"]) == (0, 4, 2)

    def test_serves_conversations(self, keeps_steps: bool) -> None:
        turns = [request("first", 4, 2), request("second", 3, 1, arrival_s=1.5, follows="first")]
        log = drive(SlotEngine(1, keeps_steps=keeps_steps), turns)
        second = log.records[1]
        assert (second.arrival_s, second.prompt_tokens, second.ttft_ms) == (3.5, 4 + 2 + 3, 1000.0)

    def test_shows_its_progress(self, keeps_steps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(progress, "_PLAIN_EVERY_S", 0.0)
        console = Terminal(file=(shown := io.StringIO()), width=200)
        engine = SlotEngine(2, keeps_steps=keeps_steps)
        with progress.show_progress(engine, REQUESTS, console) as show:
            drive(engine, REQUESTS, on_step=show)
        lines = shown.getvalue().splitlines()
        assert " ".join(lines[-1].split()).startswith("0:07 4/4 requests 1.1 tok/s 0 running 0 waiting")
        assert "KV" not in shown.getvalue()

    def test_says_when_the_next_request_arrives(self, keeps_steps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(progress, "_PLAIN_EVERY_S", 0.0)
        console = Terminal(file=(shown := io.StringIO()), width=200)
        requests = [request("late", 4, 1, arrival_s=100.0)]
        engine = SlotEngine(2, keeps_steps=keeps_steps)
        # As on a clock of real time, which is waited for.
        monkeypatch.setattr(
            "kvlab.lab.run.drive.LogicalClock", ()
        )  # as on a clock of real time, which is waited for
        stopped = iter([False, False, True])
        with progress.show_progress(engine, requests, console) as show:
            drive(engine, requests, on_step=show, should_stop=lambda: next(stopped))
        assert "0 running 0 waiting next request in 1:40" in " ".join(shown.getvalue().split())


def test_a_whole_run_needs_no_more_of_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[SlotEngine] = []

    def make(*_: object) -> SlotEngine:
        engines.append(SlotEngine(2))
        return engines[0]

    monkeypatch.setattr(execution, "make_engine", make)
    result = run_small(tmp_path, "figures=true", "debug=audit", "workload.num_requests=3", "slo.ttft_ms=1e9")
    assert not isinstance(engines[0], Auditable | Journaled)
    assert (result.status, result.metrics["requests/completed"]) == ("finished", 3)
    assert result.metrics["slo/attainment"] == 100
    assert "kv/leaked_blocks" not in result.metrics
    assert {"timeline.png", "latency.png"} <= {file.name for file in (tmp_path / "figures").iterdir()}


def test_a_log_of_nothing_has_metrics_of_requests_alone() -> None:
    assert set(run_metrics(RunLog())) == {
        "duration_s", "requests/completed", "requests/failed", "requests/refused", "tokens/prompt", "tokens/output",
    }  # fmt: skip


def test_an_engine_that_forgets_a_request_ends_the_run() -> None:
    class Forgetful(SlotEngine):
        def submit(
            self, request: Request, on_output: object = None, on_finish: FinishCallback | None = None
        ) -> None:
            super().submit(request, on_output, None if request.request_id == "b" else on_finish)

    requests = [Request(name, (1, 2, 3), SamplingParams(max_tokens=2)) for name in "abc"]
    assert [record.request_id for record in drive(SlotEngine(2), requests).records] == ["a", "b", "c"]
    with pytest.raises(
        EngineStoppedError, match="no work left, and 1 requests have not ended, the first b; it has to"
    ):
        drive(Forgetful(2), requests)


def test_what_is_no_engine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing(EngineKind):
        @staticmethod
        def check(config: RunConfig) -> None:
            pass

        @staticmethod
        def start(assignment: Assignment) -> ServingEngine:
            return cast(ServingEngine, None)

    monkeypatch.setitem(ENGINES._entries, "nothing", Nothing)
    with pytest.raises(
        ConfigError, match=r"engine\.kind=nothing: start returned None, which lacks clock, submit, st"
    ):
        run_small(tmp_path, "engine.kind=nothing")


class TurnsEngine(SlotEngine):
    """Takes steps at once, each time behind a step that does nothing."""

    takes = False

    def step(self) -> None:
        self.takes = True

    def next_wakeup(self) -> None:
        return None

    def repeat(self, until_s: float = math.inf) -> StepLog:
        takes, self.takes = self.takes, False
        record = super().step() if takes else None
        return StepLog() if record is None else StepLog([record])


def test_steps_at_once_are_work() -> None:
    log = drive(TurnsEngine(1), [request("long", 4, 1100)])
    assert [record.completed for record in log.records] == [True]
