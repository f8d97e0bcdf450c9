"""Requests of a conversation follow one another."""

from __future__ import annotations

import gc

from kvlab.core import Request, SamplingParams
from kvlab.engine.clock import LogicalClock
from kvlab.lab.drive import drive
from tests.engine.support import (
    SteadyExecutor,
    assert_empty,
    expected_tokens,
    make_engine,
    prompt_for,
    sharing_pool,
)


def turn(name: str, length: int, max_tokens: int, arrival_s: float = 0.0, follows: str | None = None) -> Request:
    return Request(name, prompt_for(name, length), SamplingParams(max_tokens), arrival_s, follows=follows)


def test_requests_that_a_full_line_refuses_are_told_of_and_the_others_served() -> None:
    engine = make_engine(max_waiting_requests=2, max_batch_size=1)
    log = drive(engine, [turn(name, 5, 3) for name in "abcd"])
    assert [s.request.request_id for s in log.sequences] == ["a", "b"]
    assert [s.output_token_ids for s in log.sequences] == [expected_tokens(s.request) for s in log.sequences]
    assert len(log.refused) == 2
    assert "'c': 2 requests are waiting" in log.refused[0]


def test_what_was_alive_before_is_no_matter_for_the_garbage_collector_while_requests_are_served() -> None:
    frozen = []
    drive(make_engine(), [turn("a", 5, 3)], on_step=lambda log, record: frozen.append(gc.get_freeze_count()))
    assert min(frozen) > 10_000  # this process has as many objects before anything runs
    assert gc.get_freeze_count() == 0


class TestConversations:
    def test_a_turn_comes_behind_what_was_said_and_after_its_end(self) -> None:
        clock = LogicalClock()
        engine = make_engine(sharing_pool(), SteadyExecutor(), clock)
        requests = [
            turn("a", 9, 3),
            turn("b", 5, 2, arrival_s=1.0),
            turn("a2", 4, 2, arrival_s=10.0, follows="a"),
            turn("a3", 3, 2, arrival_s=0.5, follows="a2"),
        ]
        log = drive(engine, requests)
        found = {s.request.request_id: s for s in log.sequences}
        assert list(found) == ["a", "b", "a2", "a3"]
        for name, before, own in (("a2", "a", requests[2]), ("a3", "a2", requests[3])):
            said = (*found[before].token_ids, *own.prompt_token_ids)
            assert found[name].request.prompt_token_ids == said
            assert found[before].finished_s is not None
            assert found[name].request.arrival_s == found[before].finished_s + own.arrival_s
            assert (found[name].scheduled_s or 0.0) >= found[name].request.arrival_s
            assert found[name].cached_tokens >= 4 * ((len(found[before].token_ids) - 1) // 4)
        for sequence in log.sequences:
            assert sequence.output_token_ids == expected_tokens(sequence.request)
        assert sum(step.counters.blocks_freed for step in log.steps) == engine.pool.counters().blocks_freed
        assert_empty(engine)

    def test_a_turn_waits_among_those_still_to_arrive(self) -> None:
        clock = LogicalClock()
        engine = make_engine(executor=SteadyExecutor(), clock=clock)
        requests = [turn("a", 4, 2), turn("z", 4, 1, arrival_s=50.0), turn("a2", 4, 1, arrival_s=20.0, follows="a")]
        log = drive(engine, requests)
        assert [s.request.request_id for s in log.sequences] == ["a", "a2", "z"]
        assert [s.request.arrival_s for s in log.sequences] == [0.0, 22.0, 50.0]

    def test_an_interrupted_conversation_says_no_more(self) -> None:
        clock = LogicalClock()
        engine = make_engine(executor=SteadyExecutor(), clock=clock)
        log = drive(
            engine, [turn("a", 4, 5), turn("a2", 4, 1, follows="a")], should_stop=lambda: clock.now() >= 2.0
        )
        assert log.interrupted
        assert [s.request.request_id for s in log.sequences] == ["a"]
        assert_empty(engine)
