"""Feeds a workload to an engine on the engine's clock, and collects the records."""

import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from operator import attrgetter

from kvlab.core import FinishReason, Request, RequestRecord, StepRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.clock import LogicalClock, WallClock
from kvlab.engine.garbage import gc_frozen
from kvlab.engine.protocol import WHY_IDLE, Repeating, ServingEngine
from kvlab.errors import EngineStoppedError, RequestRefusedError, shown
from kvlab.lab.results.log import RunLog

_MAX_SLEEP_S = 0.05  # so that a request to stop is seen soon
_MOST_IDLE, _MOST_IDLE_S = 1000, 20.0  # steps; seconds of this machine


class _Arrivals:
    """The requests of a workload as they come: by their own times, a turn when the one before it has ended; with a
    `concurrency` no more conversations at once than that.
    """

    def __init__(self, requests: list[Request], concurrency: int | None) -> None:
        self.submitted: dict[str, Request] = {}  # in that order
        self.unsent: list[str] = []  # why, of each turn behind one that failed or was refused
        self._firsts = deque(request for request in requests if request.follows is None)
        self._turns = {request.follows: request for request in requests if request.follows is not None}
        self._due: list[Request] = []  # turns whose conversation has come to them
        self._left: dict[str, int] = {}  # samples that have not ended
        # A heap: since when there is room for each conversation that may begin; None: for any number of them.
        self._room_s = None if concurrency is None else [0.0] * min(concurrency, len(requests))

    def __bool__(self) -> bool:
        return bool(self._firsts or self._due)

    @property
    def open(self) -> list[str]:
        """Requests that were submitted and have not ended."""
        return [name for name, left in self._left.items() if left]

    def upcoming(self) -> Request | None:
        """The next to be submitted, at its arrival."""
        heads = [queue[0] for queue in (() if self._room_s == [] else self._firsts, self._due) if queue]
        return min(heads, key=attrgetter("arrival_s"), default=None)

    def take(self, request: Request) -> Request:
        """The upcoming one is submitted; it arrives when there was room, where it had to wait for that."""
        if request.follows is None:
            self._firsts.popleft()
            since_s = 0.0 if self._room_s is None else heappop(self._room_s)
            if request.arrival_s < since_s:
                request = replace(request, arrival_s=since_s)
        else:
            del self._due[0]
        self._left[request.request_id] = request.sampling.n
        self.submitted[request.request_id] = request
        return request

    def refused(self) -> None:
        """The one that was submitted last ends its conversation."""
        name = next(reversed(self.submitted))
        del self._left[name]
        self._drop_turns(name, "was refused")
        self._make_room(self.submitted[name].arrival_s)

    def ended(self, record: RequestRecord) -> None:
        """A sample has ended: the next turn is due, or another conversation may begin."""
        name = record.request_id
        self._left[name] -= 1
        if record.sample == 0 and record.finish_reason is FinishReason.FAILED:
            self._drop_turns(name, "failed")
        if not self._left[name] and name not in self._turns:
            self._make_room(record.finished_s)
        turn = self._turns.get(name) if record.sample == 0 else None
        if turn is not None:
            earlier = (*self.submitted[name].prompt_token_ids, *record.output_token_ids)
            prompt, arrival = (*earlier, *turn.prompt_token_ids), record.finished_s + turn.arrival_s
            turn = replace(turn, prompt_token_ids=prompt, arrival_s=arrival)
            insort(self._due, turn, key=attrgetter("arrival_s"))

    def _make_room(self, since_s: float) -> None:
        """Another conversation may begin."""
        if self._room_s is not None:
            heappush(self._room_s, since_s)

    def _drop_turns(self, name: str, why: str) -> None:
        """The turns behind a request are not sent: there is no answer that they could go on from."""
        last = name
        while (turn := self._turns.pop(last, None)) is not None:
            last = turn.request_id
            self.unsent.append(f"{shown(last)} was not sent: {shown(name)}, an earlier turn, {why}")


class _Idle:
    """Steps in turn that did nothing, with nothing to come: so many, since then."""

    def __init__(self) -> None:
        self._steps, self._since_s = 0, 0.0

    def end(self) -> None:
        """A step did something."""
        self._steps = 0

    def wait(self, engine: ServingEngine, arrivals: _Arrivals) -> None:
        """A step did nothing, and requests have not ended: wait until something is to come. Raises
        EngineStoppedError where nothing is, and steps go on doing nothing.
        """
        clock, request = engine.clock, arrivals.upcoming()
        is_logical, before_s = isinstance(clock, LogicalClock), clock.now()
        times = (request.arrival_s if request else None, engine.next_wakeup())
        # Of another engine inf is a time, too: its clock lets it work while somebody waits.
        known = [time for time in times if time is not None and (time < math.inf or not is_logical)]
        if known:
            clock.wait_until(min(*known, math.inf if is_logical else before_s + _MAX_SLEEP_S))
        is_known = any(before_s < time < math.inf for time in known) or request is not None  # when it goes on
        if clock.now() > before_s if is_logical else is_known:
            self._steps, self._since_s = 0, before_s
            return
        self._steps, self._since_s = self._steps + 1, self._since_s if self._steps else before_s
        # Of other engines nobody knows what they do meanwhile; theirs have a limit of their own.
        lasts = is_logical or (isinstance(engine, Repeating) and before_s - self._since_s > _MOST_IDLE_S)
        if self._steps > _MOST_IDLE and lasts:
            text = f"steps do nothing any more, and {len(arrivals.open)} requests have not ended"
            first = shown(next(iter(arrivals.open), "none"))
            raise EngineStoppedError(f"{text}, the first {first}; {WHY_IDLE}")


@gc_frozen()
def drive(
    engine: ServingEngine,
    requests: list[Request],
    *,
    concurrency: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[RunLog, StepRecord | None], None] = lambda log, record: None,
    at_once: bool = True,
) -> RunLog:
    """Submit each request when it arrives, a conversation's next turn when the last has ended, and step the engine
    until all have ended. Behind a turn that failed or was refused none is sent.

    With `concurrency` the loop is closed: no more conversations than that are open at once, each a request and its
    turns; another begins, and arrives, when one has ended.

    When `should_stop` says so, requests that have not ended are aborted and the log is marked. `on_step` is called
    after each step, with None where the engine had nothing to do or keeps no steps. Unless `at_once` is False, an
    engine that can takes steps that are all alike at once: then it is called once, with the first.
    """
    log, clock, arrivals = RunLog(), engine.clock, _Arrivals(requests, concurrency)

    def on_finish(record: RequestRecord) -> None:
        log.records.append(record)
        arrivals.ended(record)

    repeat = engine.repeat if at_once and isinstance(engine, Repeating) else lambda until_s: StepLog()
    clock.restart()
    idle = _Idle()
    while arrivals or engine.has_work():
        if should_stop():
            log.interrupted = True
            break
        while (request := arrivals.upcoming()) is not None and request.arrival_s <= (looked_s := clock.now()):
            request = arrivals.take(request)
            try:
                engine.submit(request, on_finish=on_finish)
            except RequestRefusedError as error:  # a full queue: what can never be served failed in planning
                log.refused.append(str(error))
                log.refused_s.append(request.arrival_s)
                arrivals.refused()
        log.next_arrival_s = request.arrival_s if request else None
        until_s = math.inf if request is None else request.arrival_s
        if taken := repeat(until_s):
            log.steps.extend(taken)
            on_step(log, taken[0])
            idle.end()
            continue
        if request is not None and isinstance(clock, WallClock):
            clock.hold(looked_s)  # when the step begins: what arrives from here on is in the next one
        record = engine.step()
        if record is not None:
            log.steps.append(record)
            idle.end()
        elif arrivals or engine.has_work():
            idle.wait(engine, arrivals)
        on_step(log, record)
    log.refused += arrivals.unsent
    log.unsent = len(arrivals.unsent)
    if arrivals.open and not log.interrupted:
        text = f"the engine has no work left, and {len(arrivals.open)} requests have not ended, the first"
        text += f" {shown(arrivals.open[0])}; it has to call on_finish for each of a request's samples"
        raise EngineStoppedError(text)
    log.duration_s = (
        clock.now() if log.interrupted else max((ended.finished_s for ended in log.records), default=0.0)
    )
    if log.interrupted:
        for request_id in arrivals.submitted:
            engine.abort(request_id)
    record = engine.step()  # nothing is left to run: this only gives the memory back
    if record is not None:
        log.steps.append(record)
    number = {request_id: position for position, request_id in enumerate(arrivals.submitted)}
    log.records.sort(key=lambda ended: (number[ended.request_id], ended.sample))
    return log
