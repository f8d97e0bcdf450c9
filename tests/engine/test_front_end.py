"""A front end between clients and engine: one thing after the other, and the client's times in the records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvlab.config import FrameworkConfig, SchedulerConfig
from kvlab.core import FinishReason, Request, SamplingParams
from kvlab.core.step_log import StepLog
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.clock import LogicalClock
from kvlab.engine.core import EngineCore
from kvlab.engine.front_end import FrontEnd, behind_front_end
from kvlab.lab.results.log import RunLog
from kvlab.lab.run.drive import drive
from tests.simulation.test_executor import config, traffic
from tests.support.engines import make_engine
from tests.support.executors import RecordingExecutor
from tests.support.model import prompt_for

# Half a second for a request and an eighth for each token of its prompt; a quarter for each token that is sent.
SLOW = FrameworkConfig(request_us=500_000, prompt_token_us=125_000, output_token_us=250_000)


def engine(**scheduler: Any) -> EngineCore:
    """Takes a second for a step."""
    return make_engine(None, RecordingExecutor(step_s=1.0), LogicalClock(), **scheduler)


def asked(name: str, prompt: int, output: int, arrival_s: float = 0.0) -> Request:
    return Request(name, prompt_for(name, prompt), SamplingParams(output), arrival_s)


def test_requests_and_tokens_queue_for_one_server() -> None:
    log = drive(FrontEnd(engine(), SLOW), [asked("a", 4, 2), asked("b", 8, 2), asked("c", 4, 1)], concurrency=2)
    # front end: takes a 0-1, b 1-2.5; sends a's tokens 2.5-2.75, 3-3.25; takes c 3.25-4.25; sends b's 4.25-4.5 and
    # 5-5.25, c's 6-6.25. Engine: a in steps 1-2 and 2-3, b in 3-4 and 4-5, c in 5-6.
    assert [(step.start_s, step.batch_seqs) for step in log.steps[:5]] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]
    a, b, c = log.records
    assert (a.arrival_s, a.scheduled_s, a.token_times_s, a.finished_s) == (0, 1, (2.75, 3.25), 3.25)
    assert (b.arrival_s, b.scheduled_s, b.token_times_s, b.finished_s) == (0, 3, (4.5, 5.25), 5.25)
    assert (c.arrival_s, c.scheduled_s, c.token_times_s, c.finished_s) == (3.25, 5, (6.25,), 6.25)
    assert log.duration_s == 6.25


def test_tokens_of_two_passes_are_sent_when_the_step_has_ended() -> None:
    log = drive(FrontEnd(engine(mixed=False), SLOW), [asked("a", 2, 4), asked("b", 10, 2)])
    assert [step.end_s - step.start_s for step in log.steps[:4]] == [1, 1, 2, 1]
    a, _ = log.records
    # Both compute in the third step: the pass with a's third token ends a second before the step.
    assert a.token_times_s == (2.75, 3.0, 5.25, 6.25)


def test_a_closed_loop_goes_no_faster_than_the_front_end() -> None:
    slow = FrameworkConfig(output_token_us=1_000_000)
    log = drive(FrontEnd(engine(), slow), [asked(f"r{n}", 2, 4) for n in range(12)], concurrency=4)
    assert log.duration_s == 3 * (1 + 4 * 4)  # three times a step, and then a second for each of sixteen tokens


def test_what_decodes_in_vain_is_not_sent() -> None:
    slow, ends_early = FrameworkConfig(output_token_us=1_500_000), replace(asked("a", 2, 9), output_tokens=2)
    log = drive(FrontEnd(engine(ahead=True), slow), [ends_early, asked("b", 2, 4)])
    assert log.steps[2].batch_seqs == 2
    assert log.records[1].finished_s == 1 + 6 * 1.5  # of step after step, the tokens that the requests have


def test_without_costs_there_is_no_front_end() -> None:
    plain = engine()
    assert behind_front_end(plain, FrameworkConfig()) is plain
    assert isinstance(behind_front_end(plain, SLOW), FrontEnd)


def test_steps_at_once_are_those_one_by_one() -> None:
    """Also where they end with a sequence's last token, whose client then asks again."""
    costs = FrameworkConfig(request_us=3000, prompt_token_us=20, output_token_us=400)

    def served(*, at_once: bool) -> tuple[RunLog, int]:
        many = [replace(r, request_id=f"{r.request_id}/{n}", arrival_s=0.0) for n in range(2) for r in traffic()]
        front_end, taken = FrontEnd(build_engine(plan_engine(config("simulated"))), costs), 0
        repeat = front_end.repeat

        def counted(until_s: float) -> StepLog:
            nonlocal taken
            records = repeat(until_s)
            taken += len(records)
            return records

        front_end.repeat = counted  # type: ignore[method-assign]
        return drive(front_end, many, concurrency=3, at_once=at_once), taken

    (plain, none), (at_once, taken) = served(at_once=False), served(at_once=True)
    assert (at_once.records, at_once.steps) == (plain.records, plain.steps)
    assert (none, taken > 10) == (0, True)


def test_a_client_that_is_refused_asks_again_before_many_steps_are_taken_at_once() -> None:
    settings = config("simulated", scheduler=SchedulerConfig(max_batch_size=1, max_waiting_requests=1))
    front_end = FrontEnd(build_engine(plan_engine(settings)), FrameworkConfig(request_us=1000))
    log = drive(front_end, [asked(name, 4, 30) for name in "abcde"], concurrency=3)
    assert [record.request_id for record in log.records if not record.completed] == ["c", "d", "e"]
    assert log.records[-1].finished_s < log.records[0].finished_s, "the steps of a were taken first"


def test_requests_that_are_with_the_front_end_are_aborted_like_others() -> None:
    front_end = FrontEnd(engine(), SLOW)
    requests = [asked("a", 4, 9), asked("b", 4, 9), asked("c", 4, 9, arrival_s=0.5)]
    log = drive(front_end, requests, should_stop=lambda: front_end.clock.now() >= 1.5)
    assert {r.request_id: r.finish_reason for r in log.records} == dict.fromkeys("abc", FinishReason.ABORTED)
    assert front_end.audit() == []


def test_what_a_full_queue_refuses_behind_the_front_end_has_failed() -> None:
    quick = FrameworkConfig(request_us=1000)
    asking = [asked(name, 4, 3) for name in "abcd"]
    log = drive(FrontEnd(engine(max_waiting_requests=2, max_batch_size=1), quick), asking)
    assert [record.request_id for record in log.records if record.completed] == ["a", "b", "c"]
    failed = log.records[3]
    assert (failed.finish_reason, failed.error) == (FinishReason.FAILED, failed.error)
    assert "2 requests are waiting" in str(failed.error)
