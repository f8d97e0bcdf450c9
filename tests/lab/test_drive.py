"""Requests of a conversation follow one another."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvlab.core import FinishReason, Request, SamplingParams, StepRecord
from kvlab.engine import clock as clocks
from kvlab.engine.clock import LogicalClock, WallClock
from kvlab.lab.results.log import RunLog
from kvlab.lab.run.drive import drive
from tests.lab.test_any_engine import SlotEngine
from tests.support.engines import assert_empty, make_engine
from tests.support.executors import FailingExecutor, RecordingExecutor
from tests.support.model import expected_tokens, prompt_for
from tests.support.pools import sharing_pool
from tests.support.records import counted


def turn(name: str, length: int, max_tokens: int, arrival_s: float = 0.0, follows: str | None = None) -> Request:
    return Request(name, prompt_for(name, length), SamplingParams(max_tokens), arrival_s, follows=follows)


def test_requests_that_a_full_queue_refuses_are_reported_and_the_others_served() -> None:
    engine = make_engine(max_waiting_requests=2, max_batch_size=1)
    log = drive(engine, [turn(name, 5, 3) for name in "abcd"])
    assert [r.request_id for r in log.records] == ["a", "b"]
    assert [list(r.output_token_ids) for r in log.records] == [expected_tokens(turn(n, 5, 3)) for n in "ab"]
    assert len(log.refused) == 2
    assert "'c': 2 requests are waiting" in log.refused[0]
    assert log.refused_s == [0.0, 0.0]


@pytest.mark.usefixtures("no_requests_are_served")
def test_the_garbage_collector_skips_earlier_objects_while_requests_are_served() -> None:
    frozen = []
    drive(make_engine(), [turn("a", 5, 3)], on_step=lambda log, record: frozen.append(gc.get_freeze_count()))
    assert min(frozen) > 10_000  # this process has as many objects before anything runs
    assert gc.get_freeze_count() == 0


def test_records_are_in_the_order_of_submission_samples_in_order() -> None:
    requests = [
        turn("long", 4, 9),
        turn("short", 4, 1),
        Request("two", prompt_for("two", 4), SamplingParams(3, n=2)),
    ]
    ended: list[str] = []

    def on_step(log: RunLog, record: StepRecord | None) -> None:
        ended[:] = [each.name for each in log.records]

    log = drive(make_engine(), requests, on_step=on_step)
    assert ended[0] == "short"  # while it runs, in the order of their ends
    assert [record.name for record in log.records] == ["long", "short", "two", "two #1"]
    assert log.completed == 4


class TestConversations:
    def test_a_turn_has_the_conversation_as_prefix_and_arrives_after_its_end(self) -> None:
        clock = LogicalClock()
        engine = make_engine(sharing_pool(), RecordingExecutor(step_s=1.0), clock)
        requests = [
            turn("a", 9, 3),
            turn("b", 5, 2, arrival_s=1.0),
            turn("a2", 4, 2, arrival_s=10.0, follows="a"),
            turn("a3", 3, 2, arrival_s=0.5, follows="a2"),
        ]
        log = drive(engine, requests)
        found = {r.request_id: r for r in log.records}
        assert list(found) == ["a", "b", "a2", "a3"]
        prompts = {name: requests[index].prompt_token_ids for index, name in enumerate(("a", "b"))}
        for name, before, own in (("a2", "a", requests[2]), ("a3", "a2", requests[3])):
            spoken = (*prompts[before], *found[before].output_token_ids)
            prompts[name] = (*spoken, *own.prompt_token_ids)
            assert found[name].prompt_tokens == len(prompts[name])
            assert found[name].arrival_s == found[before].finished_s + own.arrival_s
            assert (found[name].scheduled_s or 0.0) >= found[name].arrival_s
            assert found[name].cached_tokens >= 4 * ((len(spoken) - 1) // 4)
        for request in requests:
            whole = replace(request, prompt_token_ids=prompts[request.request_id])
            assert list(found[request.request_id].output_token_ids) == expected_tokens(whole)
        assert sum(counted(step).blocks_freed for step in log.steps) == engine.pool.counters().blocks_freed
        assert_empty(engine)

    def test_a_turn_waits_among_those_still_to_arrive(self) -> None:
        clock = LogicalClock()
        engine = make_engine(executor=RecordingExecutor(step_s=1.0), clock=clock)
        requests = [turn("a", 4, 2), turn("z", 4, 1, arrival_s=50.0), turn("a2", 4, 1, arrival_s=20.0, follows="a")]
        log = drive(engine, requests)
        assert [r.request_id for r in log.records] == ["a", "a2", "z"]
        assert [r.arrival_s for r in log.records] == [0.0, 22.0, 50.0]

    def test_an_interrupted_conversation_has_no_further_turn(self) -> None:
        clock = LogicalClock()
        engine = make_engine(executor=RecordingExecutor(step_s=1.0), clock=clock)
        log = drive(
            engine, [turn("a", 4, 5), turn("a2", 4, 1, follows="a")], should_stop=lambda: clock.now() >= 2.0
        )
        assert log.interrupted
        (record,) = log.records  # of a request that was aborted too
        assert (record.request_id, record.finish_reason, record.finished_s) == ("a", FinishReason.ABORTED, 2.0)
        assert len(record.output_token_ids) == 2
        assert_empty(engine)

    def test_behind_a_turn_that_fails_none_is_sent(self) -> None:
        engine = make_engine(executor=FailingExecutor("a2"))
        follows = {"a2": "a", "a3": "a2", "a4": "a3"}
        requests = [turn(name, 4, 2, follows=follows.get(name)) for name in ("a", "b", "a2", "a3", "a4")]
        log = drive(engine, requests, concurrency=1)
        assert {r.request_id: r.completed for r in log.records} == {"a": True, "a2": False, "b": True}
        said = "was not sent: a2, an earlier turn, failed"
        assert (log.refused, log.refused_s, log.unsent) == ([f"a3 {said}", f"a4 {said}"], [], 2)

    def test_behind_a_turn_that_is_refused_none_is_sent(self) -> None:
        engine = make_engine(max_waiting_requests=1, max_batch_size=1)
        requests = [turn("a", 4, 2), turn("b", 4, 2), turn("b2", 4, 2, follows="b")]
        log = drive(engine, requests)
        assert (len(log.refused), log.refused_s, log.unsent) == (2, [0.0], 1)
        assert log.refused[1] == "b2 was not sent: b, an earlier turn, was refused"


class TestClosedLoop:
    def test_the_next_request_arrives_when_one_ends(self) -> None:
        engine = make_engine(executor=RecordingExecutor(step_s=1.0), clock=LogicalClock())
        requests = [turn(name, 4, tokens) for name, tokens in (("a", 2), ("b", 4), ("c", 3), ("d", 1), ("e", 1))]
        log = drive(engine, requests, concurrency=2)
        spans = {r.request_id: (r.arrival_s, r.finished_s) for r in log.records}
        assert spans == {"a": (0, 2), "b": (0, 4), "c": (2, 5), "d": (4, 5), "e": (5, 6)}
        assert max(step.running for step in log.steps) == 2

    def test_a_request_that_had_room_keeps_its_arrival(self) -> None:
        engine = make_engine(executor=RecordingExecutor(step_s=1.0), clock=LogicalClock())
        requests = [
            turn("a", 4, 3),
            turn("b", 4, 3, arrival_s=0.5),
            turn("c", 4, 1, arrival_s=1.5),
            turn("d", 4, 1, 9),
        ]
        log = drive(engine, requests, concurrency=2)
        assert [record.arrival_s for record in log.records] == [0.0, 0.5, 3.0, 9.0]

    def test_each_client_asks_again_when_its_own_request_ends(self) -> None:
        """Also where two end in one step, in passes of their own."""
        engine = make_engine(executor=RecordingExecutor(step_s=1.0), clock=LogicalClock(), mixed=False)
        requests = [turn("a", 4, 2), turn("b", 4, 1, arrival_s=0.5), turn("c", 4, 1), turn("d", 4, 1)]
        log = drive(engine, requests, concurrency=2)
        assert [record.finished_s for record in log.records[:2]] == [2.0, 3.0]
        assert [record.arrival_s for record in log.records] == [0.0, 0.5, 2.0, 3.0]

    def test_a_conversation_stays_open_to_its_last_turn_and_a_request_to_its_last_sample(self) -> None:
        engine = make_engine(executor=RecordingExecutor(step_s=1.0), clock=LogicalClock())
        two = Request("two", prompt_for("two", 4), SamplingParams(3, n=2))
        requests = [turn("a", 4, 2), two, turn("z", 4, 1), turn("a2", 4, 1, arrival_s=2.0, follows="a")]
        log = drive(engine, requests, concurrency=1)
        ends = [(record.name, record.arrival_s, record.finished_s) for record in log.records]
        assert ends == [("a", 0, 2), ("a2", 4, 5), ("two", 5, 8), ("two #1", 5, 9), ("z", 9, 10)]

    def test_a_refused_request_leaves_its_place_to_the_next(self) -> None:
        engine = make_engine(max_waiting_requests=1, max_batch_size=1)
        log = drive(engine, [turn(name, 5, 3) for name in "abcdef"], concurrency=3)
        assert len(log.refused) + len(log.records) == 6
        assert log.records


def test_a_step_begins_when_it_was_looked_for_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the record tells which steps a request was too late for; each look at the clock takes a second."""
    ticks = itertools.count()
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks)), sleep=abs))

    class Late(SlotEngine):
        def __init__(self) -> None:
            super().__init__(4)
            self.clock = WallClock()  # type: ignore[assignment]
            self.begun: list[tuple[float, int]] = []

        def step(self) -> StepRecord | None:
            self.begun.append((self.clock.now(), len(self.entries)))
            if len(self.begun) >= 30:
                for entry in list(self.entries):
                    self.end(entry, FinishReason.LENGTH)
            return None

        def next_wakeup(self) -> float | None:
            return 0.0  # there is always something to do

    engine = Late()
    drive(engine, [Request(f"r{at}", (1,), SamplingParams(1), arrival_s=at + 0.5) for at in range(0, 80, 4)])
    for start_s, there in engine.begun[:29]:
        assert there == sum(at + 0.5 <= start_s for at in range(0, 80, 4))
