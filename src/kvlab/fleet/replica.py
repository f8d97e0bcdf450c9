"""One replica of a simulated fleet: its engine, when it goes on, and what routers may see of it."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from kvlab.core import Request, RequestRecord, Sequence, StepRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.core import EngineCore
from kvlab.engine.front_end import FrontEnd
from kvlab.engine.protocol import FinishCallback, OutputCallback
from kvlab.fleet.base import ReplicaView, RoutedRequest
from kvlab.fleet.prefixes import PrefixView
from kvlab.kv.pool import BlockPool
from kvlab.kv.reset import drop_cached


class Asked(NamedTuple):
    """A request as it was handed in, and whom to tell; `again` serves it anew if it is lost with its replica, and
    is given the time and may raise RequestRefusedError. None: it arrives again.
    """

    request: Request
    on_output: OutputCallback | None
    on_finish: FinishCallback
    again: Callable[[float], None] | None = None


class Load(NamedTuple):
    """A replica in a step."""

    start_s: float
    running: int
    waiting: int
    blocks_in_use: int
    kv_usage: float  # 0 to 1


_EMPTY = Load(-math.inf, 0, 0, 0, 0.0)


class _Loads(NamedTuple):
    """The loads of steps that were taken at once."""

    starts_s: list[float]
    ends_s: list[float]
    running: int
    waiting: int
    blocks_in_use: list[int]
    blocks_total: int

    def times(self, *, ended: bool) -> list[float]:
        """When they began, or ended."""
        return self.ends_s if ended else self.starts_s

    def at(self, when: float, *, ended: bool) -> Load:
        """That of the last that began, or ended, by then, or of the first."""
        place = max(bisect_right(self.times(ended=ended), when) - 1, 0)
        blocks = self.blocks_in_use[place]
        usage = blocks / self.blocks_total if self.blocks_total else 0.0
        return Load(self.starts_s[place], self.running, self.waiting, blocks, usage)


class Replica:
    """An engine with a clock of its own. `due_s` is when it has something to do next: the fleet steps the one that
    is due first, so that nothing that a replica does depends on what comes later.

    A step is taken at once and ends later: what others see of it is what was so when it began.
    """

    def __init__(self, index: int, engine: EngineCore | FrontEnd) -> None:
        self.index, self.engine = index, engine
        self.core = engine.core if isinstance(engine, FrontEnd) else engine
        self.core.replica = index
        self.due_s = math.inf
        self._loads: deque[_Loads] = deque([_Loads([-math.inf], [-math.inf], 0, 0, [0], 0)])
        self.sent_s: list[float] = []  # when each request was sent here
        self._ends_s: list[float] = []  # a heap: when those that are known to end, end
        self._ended = 0
        self.takes_requests = True
        self.may_die = False
        self.in_flight_requests: dict[str, Asked] = {}
        self._left: dict[str, int] = {}  # samples that have not ended
        self._held: dict[str, list[RequestRecord]] = {}  # of samples that have ended, until their request has
        self._lost: set[str] = set()

    def submit(self, asked: Asked, now: float) -> None:
        """Queue a request that arrives now. Raises RequestRefusedError or QueueFullError, changing nothing."""
        if not self.engine.has_work():
            self.engine.clock.wait_until(now)

        request, on_output, on_finish, _ = asked
        name = request.request_id
        held = self._held[name] = list[RequestRecord]()

        def ended(record: RequestRecord) -> None:
            held.append(replace(record, replica=self.index))
            self._left[name] -= 1
            if not self._left[name]:
                del self._left[name], self.in_flight_requests[name], self._held[name]
                heapq.heappush(self._ends_s, record.finished_s)
            elif self.may_die:
                return  # of a request that is lost nothing is told, nor of its samples that had ended
            for each in () if name in self._lost else held:
                on_finish(each)
            held.clear()

        self._left[name] = request.sampling.n
        self.in_flight_requests[name] = asked
        try:
            self.engine.submit(request, on_output, ended)
        except Exception:
            del self._left[name], self.in_flight_requests[name], self._held[name]
            raise
        self.sent_s.append(now)
        self.due_s = min(self.due_s, max(now, self.engine.clock.now()))

    def lost_tokens(self) -> int:
        """Tokens that it computed for requests that have not ended: of prompts, unless found, and of outputs."""
        sequences = self.sequences()
        held = [record for records in self._held.values() for record in records]
        outputs = [len(each.token_times_s) for each in sequences] + [len(each.token_times_s) for each in held]
        computed = [
            min(each.high_water, each.num_prompt_tokens) - each.cached_tokens
            for each in sequences
            if not each.index
        ]
        computed += [(each.computed_prompt_tokens or 0) - each.cached_tokens for each in held]
        return sum(outputs) + sum(max(tokens, 0) for tokens in computed)

    def die(self) -> list[Asked]:
        """Lose all requests, of which nothing is reported, and all cached content; returns the requests in order. A
        step that has begun was the last.
        """
        lost = list(self.in_flight_requests.values())
        self._lost = set(self.in_flight_requests)
        for asked in lost:
            self.engine.abort(asked.request.request_id)
        self._lost = set()
        if self.engine.has_work():
            self.engine.step()  # gives the memory back
        self.forget()
        self.settle(progressed=True)
        return lost

    def forget(self) -> None:
        """Lose what is cached for requests to come."""
        if isinstance(self.core.pool, BlockPool):
            drop_cached(self.core.pool)

    def step(self) -> StepRecord | None:
        """A step that begins when one is due; None if there was nothing to do then."""
        self.engine.clock.wait_until(self.due_s)
        record = self.engine.step()
        if record is not None:
            blocks = (0, 0) if record.pool is None else (record.pool.blocks_in_use, record.pool.blocks_total)
            starts, ends = [record.start_s], [record.end_s]
            self._loads.append(_Loads(starts, ends, record.running, record.waiting, [blocks[0]], blocks[1]))
        return record

    def repeat(self, until_s: float) -> StepLog:
        """See Repeating."""
        self.engine.clock.wait_until(self.due_s)
        steps = self.engine.repeat(until_s)
        if steps:
            names = ("start_s", "end_s", "pool.blocks_in_use")
            starts, ends, blocks = (steps.column(name).tolist() for name in names)
            first, total = steps[0], int(steps.column("pool.blocks_total")[0])
            self._loads.append(_Loads(starts, ends, first.running, first.waiting, blocks, total))
        return steps

    def wake(self, now: float) -> None:
        """Something that it may have waited for has come: blocks that others held, or contents."""
        self.core.scheduler.refused = None
        if self.engine.has_work():
            self.due_s = min(self.due_s, max(now, self.engine.clock.now()))

    def settle(self, progressed: bool) -> None:
        """Find out when it goes on, after a step that did something or not."""
        engine = self.engine
        if not engine.has_work():
            self.due_s = math.inf
        elif progressed:
            self.due_s = engine.clock.now()
        else:
            wakeup = engine.next_wakeup()
            self.due_s = math.inf if wakeup is None else max(wakeup, engine.clock.now())

    def in_flight(self, now: float) -> int:
        """Requests that were sent here and have not ended."""
        while self._ends_s and self._ends_s[0] <= now:
            heapq.heappop(self._ends_s)
            self._ended += 1
        return len(self.sent_s) - self._ended

    def load_at(self, when: float, *, ended: bool) -> Load:
        """Its load in the last step that began, or `ended`, by `when`; never asked for an earlier time again."""
        while len(self._loads) > 1 and self._loads[1].ends_s[0] <= when:
            self._loads.popleft()
        return self.load_before(when, ended=ended)

    def load_before(self, when: float, *, ended: bool = False) -> Load:
        """The same, of which an earlier time may be asked again."""
        known = (load for load in reversed(self._loads) if load.times(ended=ended)[0] <= when)
        return next(known, self._loads[0]).at(when, ended=ended)

    def sent_between(self, after_s: float, until_s: float) -> int:
        """Requests that were sent here after one moment, up to another."""
        return bisect_right(self.sent_s, until_s) - bisect_right(self.sent_s, after_s)

    def sequences(self) -> list[Sequence]:
        """Its sequences that have not ended."""
        scheduler = self.core.scheduler
        return [sequence for sequence in (*scheduler.waiting, *scheduler.running) if sequence.finish_reason is None]


class SimulatedView(ReplicaView):
    """A replica as a router sees it. Between two looks, `period_s` apart, queues and memory are those of the last,
    and then what a server's metrics say: vLLM's are of the last step that has ended, and know nothing of requests
    that have come since. 0: as the last step began, and what has come since.
    """

    def __init__(self, replica: Replica, period_s: float = 0.0, prefixes: PrefixView | None = None) -> None:
        self._replica, self._period_s = replica, period_s
        self.prefixes = prefixes or PrefixView()
        self._now = 0.0
        self._seen_s = 0.0  # of the last look
        self._load = _EMPTY

    def at(self, now: float) -> SimulatedView:
        """The view of this moment, which is no earlier than the last."""
        self._now = now
        self._seen_s = now // self._period_s * self._period_s if self._period_s else now
        self._load = self._replica.load_at(self._seen_s, ended=bool(self._period_s))
        return self

    @property
    def index(self) -> int:
        return self._replica.index

    @property
    def block_size(self) -> int:
        return self._replica.core.pool.block_size

    @property
    def in_flight(self) -> int:
        return self._replica.in_flight(self._now)

    @property
    def running(self) -> int:
        return self._load.running

    @property
    def waiting(self) -> int:
        come = 0 if self._period_s else self._replica.sent_between(self._load.start_s, self._seen_s)
        return self._load.waiting + come

    @property
    def sent_since(self) -> int:
        return self._replica.sent_between(self._seen_s, self._now)

    @property
    def kv_usage(self) -> float:
        return self._load.kv_usage

    @property
    def blocks_in_use(self) -> int:
        return self._load.blocks_in_use

    @property
    def prefill_tokens(self) -> int:
        sequences = [sequence for sequence in self._replica.sequences() if not sequence.is_decoding]
        return sum(max(sequence.num_prompt_tokens - sequence.num_prefilled, 0) for sequence in sequences)

    @property
    def work_tokens(self) -> int:
        sequences = self._replica.sequences()
        outputs = sum(sequence.request.sampling.max_tokens - len(sequence.token_times_s) for sequence in sequences)
        return outputs + self.prefill_tokens

    @property
    def remembered(self) -> int:
        return self.prefixes.remembered

    def cached_tokens(self, request: RoutedRequest) -> int:
        return self.prefixes.cached_tokens(request, self._now)
