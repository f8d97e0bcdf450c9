"""Feeds a workload to an engine on the engine's clock, and keeps the log."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvlab.core import FinishReason, Request, Sequence, StepRecord
from kvlab.engine.engine import Engine
from kvlab.errors import RequestRefusedError
from kvlab.kv.journal import BlockJournal
from kvlab.lab.heap import heap_at_rest

_NAP_S = 0.05  # the longest sleep, so that a request to stop is seen soon


@dataclass(slots=True)
class RunLog:
    """What happened: each request's sequence and each step, in order."""

    sequences: list[Sequence] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # why, of each request that the engine did not take
    duration_s: float = 0.0  # from the first possible arrival to the last event
    interrupted: bool = False
    journal: BlockJournal | None = None  # what happened to each block, where that was kept


@heap_at_rest()
def drive(
    engine: Engine,
    requests: list[Request],
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[RunLog, StepRecord | None], None] = lambda log, record: None,
) -> RunLog:
    """Submit each request when it arrives, a conversation's next turn when the last has ended, and step the engine
    until all have ended.

    When `should_stop` says so, sequences that have not ended are aborted and the log is marked. `on_step` is
    called after each step, and with None while the engine waits for an arrival.
    """
    log = RunLog()
    pending = deque(request for request in requests if request.follows is None)
    turns = {request.follows: request for request in requests if request.follows is not None}
    talking: list[Sequence] = []  # sequences that another turn follows
    clock = engine.clock
    clock.restart()
    while pending or engine.has_work():
        if should_stop():
            log.interrupted = True
            break
        while pending and pending[0].arrival_s <= clock.now():
            try:
                sequence = engine.add_request(pending.popleft())
            except RequestRefusedError as error:  # a full line; what cannot be served at all was told at the start
                log.refused.append(str(error))
                continue
            log.sequences += [sequence, *sequence.siblings]
            if sequence.request.request_id in turns:
                talking.append(sequence)
        record = engine.step()
        for sequence in [s for s in talking if s.finish_reason is not None]:
            talking.remove(sequence)
            _insert(pending, _next_turn(turns[sequence.request.request_id], sequence))
        if record is not None:
            log.steps.append(record)
        elif pending or engine.has_work():
            events = [pending[0].arrival_s] if pending else []
            wakeup = engine.next_wakeup()
            if wakeup is not None:
                events.append(wakeup)
            if events:
                clock.wait_until(min(min(events), clock.now() + _NAP_S))
        on_step(log, record)
    log.duration_s = clock.now() if log.interrupted else _end(log)
    for sequence in log.sequences:
        if sequence.finish_reason is None:
            engine.abort(sequence.request.request_id)
    record = engine.step()  # nothing is left to run: this only gives the memory back
    if record is not None:
        log.steps.append(record)
    return log


def completed(log: RunLog) -> list[Sequence]:
    """The sequences that ended as their requests asked."""
    return [s for s in log.sequences if s.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)]


def _next_turn(turn: Request, last: Sequence) -> Request:
    """The turn behind what its conversation has said so far."""
    said = (*last.token_ids, *turn.prompt_token_ids)
    return replace(turn, prompt_token_ids=said, arrival_s=(last.finished_s or 0.0) + turn.arrival_s)


def _insert(pending: deque[Request], request: Request) -> None:
    """Put a request among those still to arrive, in order."""
    place = bisect([other.arrival_s for other in pending], request.arrival_s)
    pending.insert(place, request)


def _end(log: RunLog) -> float:
    return max((sequence.finished_s or 0.0 for sequence in log.sequences), default=0.0)
