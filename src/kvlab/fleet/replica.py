"""One replica of a fleet: its engine, when it is due, and what routers may see of it."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple, Self

from kvlab.core import FinishReason, Request, RequestRecord, Sequence, StepRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.core import EngineCore
from kvlab.engine.front_end import FrontEnd, end_unserved
from kvlab.engine.protocol import FinishCallback, OutputCallback
from kvlab.fleet.base import RoutedRequest
from kvlab.fleet.prefixes import PrefixView
from kvlab.fleet.store import SharedStore
from kvlab.kv.pool import BlockPool
from kvlab.kv.reset import drop_cached
from kvlab.kv.tiers.base import Key
from kvlab.kv.tiers.loads import Load as KVLoad


class Asked(NamedTuple):
    """A request as it was handed in, whom to tell, and how it is served: `serve` is given the time and may raise
    RequestRefusedError. It is called once more if the request is lost with its replica.
    """

    request: Request
    on_output: OutputCallback | None
    on_finish: FinishCallback
    serve: Callable[[float], None]

    def end(self, reason: FinishReason, now: float, error: str | None = None) -> None:
        """Tell that it ended and nothing served it."""
        end_unserved(self.request, self.on_finish, reason, now, error)


class Load(NamedTuple):
    """A replica in a step."""

    start_s: float
    running: int
    waiting: int
    blocks_in_use: int
    kv_usage: float  # 0 to 1


@dataclass(slots=True)
class _InFlight:
    """A request that was sent to a replica and has not ended."""

    asked: Asked
    samples: int  # that have not ended
    ended: list[RequestRecord] = field(default_factory=list)  # samples that have ended and were not told yet
    is_lost: bool = False  # with the replica: nothing is told any more


class Replica:
    """An engine with a clock of its own. `due_s` is when it has something to do next; infinite: nothing.

    A step is taken when it begins, and ends later on the replica's clock. Until then others see the replica as it
    was when the step began.
    """

    def __init__(self, index: int, engine: EngineCore | FrontEnd) -> None:
        self.index, self.engine = index, engine
        self.core = engine.core if isinstance(engine, FrontEnd) else engine
        self.core.replica = index
        self.due_s = math.inf
        self.takes_requests = True
        self.may_die = False
        self.prefixes = PrefixView()  # what the router knows of its cache
        self.sent_s: list[float] = []  # when each request was sent here
        self._ends_s: list[float] = []  # a heap: when requests ended, or will as soon as their last step has
        self._open: dict[str, _InFlight] = {}  # by request
        self._loads = [Load(-math.inf, 0, 0, 0, 0.0)]  # of steps that somebody may ask about; the first is of none
        self._step_ends_s = [-math.inf]  # when each of these ended

    def submit(self, asked: Asked, now: float) -> None:
        """Queue a request that arrives now. Raises RequestRefusedError or QueueFullError, changing nothing."""
        if not self.engine.has_work():
            self.engine.clock.wait_until(now)
        name = asked.request.request_id
        sent = self._open[name] = _InFlight(asked, asked.request.sampling.n)
        try:
            self.engine.submit(asked.request, asked.on_output, partial(self._end_sample, sent))
        except Exception:
            del self._open[name]
            raise
        self.sent_s.append(now)
        self.due_s = min(self.due_s, max(now, self.engine.clock.now()))

    def abort(self, request_id: str, now: float) -> bool:
        """End a request that it has now, whatever it waits for. False if it is not here."""
        if request_id not in self._open:
            return False
        self.engine.clock.wait_until(now)
        self.engine.abort(request_id)
        self.settle(progressed=True)  # its memory comes back in a step
        return True

    def _end_sample(self, sent: _InFlight, record: RequestRecord) -> None:
        sent.samples -= 1
        sent.ended.append(replace(record, replica=self.index))
        if not sent.samples:
            del self._open[record.request_id]
            heapq.heappush(self._ends_s, record.finished_s)
        elif self.may_die:
            return  # if the request is lost before all have ended, none of its samples is told
        for each in () if sent.is_lost else sent.ended:
            sent.asked.on_finish(each)
        sent.ended.clear()

    def lost_tokens(self) -> int:
        """Tokens that it computed for requests that have not ended: outputs, and prompts less what was cached."""
        sequences: list[Sequence] = [*self.core.scheduler.waiting, *self.running()]
        ended = [record for sent in self._open.values() for record in sent.ended]
        outputs = [len(each.token_times_s) for each in sequences] + [len(each.token_times_s) for each in ended]
        prompts = [
            min(each.high_water, each.num_prompt_tokens) - each.cached_tokens
            for each in sequences
            if not each.index
        ]
        prompts += [(each.computed_prompt_tokens or 0) - each.cached_tokens for each in ended]
        return sum(outputs) + sum(max(tokens, 0) for tokens in prompts)

    def die(self) -> list[Asked]:
        """Lose all requests, which are not told, and all cached contents. Returns the requests in the order in
        which they came. A step that has begun is the last.
        """
        lost = list(self._open.values())
        for sent in lost:
            sent.is_lost = True
            self.engine.abort(sent.asked.request.request_id)
        if self.engine.has_work():
            self.engine.step()  # gives the memory back
        self.forget()
        self.settle(progressed=True)
        return [sent.asked for sent in lost]

    def forget(self) -> None:
        """Drop all cached contents, and what the router remembers of them."""
        self.prefixes.restarted()
        if isinstance(self.core.pool, BlockPool):
            drop_cached(self.core.pool)

    def step(self) -> StepRecord | None:
        """Take the step that is due; None if there was nothing to do."""
        self.engine.clock.wait_until(self.due_s)
        record = self.engine.step()
        if record is not None:
            blocks = (0, 0) if record.pool is None else (record.pool.blocks_in_use, record.pool.blocks_total)
            self._note([(record.start_s, record.running, record.waiting, *blocks)], [record.end_s])
        return record

    def repeat(self, until_s: float) -> StepLog:
        """See Repeating."""
        self.engine.clock.wait_until(self.due_s)
        steps = self.engine.repeat(until_s)
        if steps:
            names = ("start_s", "running", "waiting", "pool.blocks_in_use", "pool.blocks_total")
            columns = (steps.column(name).tolist() for name in names)
            self._note(zip(*columns, strict=True), steps.column("end_s").tolist())
        return steps

    def _note(self, steps: Iterable[tuple[float, int, int, int, int]], ends_s: list[float]) -> None:
        """Remember its loads in steps: when each began, what ran and waited, blocks in use and in all."""
        for start_s, running, waiting, used, total in steps:
            self._loads.append(Load(start_s, running, waiting, used, used / total if total else 0.0))
        self._step_ends_s += ends_s

    @property
    def loading(self) -> Mapping[Key, KVLoad]:
        """The contents that are on their way into its pool."""
        pool = self.core.pool
        return pool.offload.loading if isinstance(pool, BlockPool) else {}

    def lose_load(self, load: KVLoad, now: float) -> None:
        """A load into its pool fails: the sequences that wait for it compute its tokens instead."""
        load.is_lost, load.done_s = True, now
        self.wake(now)

    def wake(self, now: float) -> None:
        """Let it try again: blocks that others held are free, or a load has ended."""
        self.core.scheduler.refused = None
        if self.engine.has_work():
            self.due_s = min(self.due_s, max(now, self.engine.clock.now()))

    def settle(self, progressed: bool) -> None:
        """Set `due_s` after a step; `progressed`: whether that did anything."""
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
        return len(self._open) + len(self._ends_s)

    def load_at(self, when: float, *, ended: bool = False) -> Load:
        """Its load in the last step that began, or `ended`, by `when`; if none had, in the first that is known."""
        ends_s, loads = self._step_ends_s, self._loads
        count = bisect_right(ends_s, when) if ended else bisect_right(loads, when, key=attrgetter("start_s"))
        return loads[max(count - 1, 0)]

    def forget_loads(self, before: float) -> None:
        """Nobody will ask for its load at an earlier time."""
        gone = max(bisect_right(self._step_ends_s, before) - 1, 0)
        del self._loads[:gone], self._step_ends_s[:gone]

    def sent_between(self, after_s: float, until_s: float) -> int:
        """Requests that were sent here after one moment, up to another."""
        return bisect_right(self.sent_s, until_s) - bisect_right(self.sent_s, after_s)

    def running(self) -> list[Sequence]:
        """Its sequences that run and have not ended. It may have far more that wait."""
        return [each for each in self.core.scheduler.running if each.finish_reason is None]


class SimulatedView:
    """A replica as a router sees it (ReplicaView). With a `period_s` the router looks at queues and memory as often
    as that, and sees what vLLM's metrics say: the last step that has ended, without requests that have come since.
    0: it sees the last step that has begun, and what has come since.

    If the router knows what is in a `store`, each token there, behind those that the replica has cached, counts
    `store_weight` of a cached one (llm-d's weights of tiers).
    """

    def __init__(
        self,
        replica: Replica,
        period_s: float = 0.0,
        prefixes: PrefixView | None = None,
        *,
        store: SharedStore | None = None,
        store_weight: float = 0.0,
    ) -> None:
        self._replica, self._period_s = replica, period_s
        self._store, self._store_weight = store, store_weight
        self.index, self.block_size = replica.index, replica.core.pool.block_size
        replica.prefixes = self.prefixes = prefixes or PrefixView()
        self.at(0.0)

    def at(self, now: float) -> Self:
        """The view of this moment, which is no earlier than the last."""
        self._now = now
        self._seen_s = now // self._period_s * self._period_s if self._period_s else now  # of the last look
        self._replica.forget_loads(self._seen_s)
        load = self._load = self._replica.load_at(self._seen_s, ended=bool(self._period_s))
        self.running, self.kv_usage, self.blocks_in_use = load.running, load.kv_usage, load.blocks_in_use
        return self

    @property
    def in_flight(self) -> int:
        """See ReplicaView."""
        return self._replica.in_flight(self._now)

    @property
    def waiting(self) -> int:
        """See ReplicaView."""
        come = 0 if self._period_s else self._replica.sent_between(self._load.start_s, self._seen_s)
        return self._load.waiting + come

    @property
    def sent_since(self) -> int:
        """See ReplicaView."""
        return self._replica.sent_between(self._seen_s, self._now)

    @property
    def prefill_tokens(self) -> int:
        """See ReplicaView."""
        prefilling = [each for each in self._replica.running() if not each.is_decoding]
        running = sum(max(each.num_prompt_tokens - each.num_prefilled, 0) for each in prefilling)
        return running + self._replica.core.scheduler.waiting.prompt_tokens

    @property
    def work_tokens(self) -> int:
        """See ReplicaView."""
        outputs = sum(each.request.expected_tokens - len(each.token_times_s) for each in self._replica.running())
        return outputs + self._replica.core.scheduler.waiting.output_tokens + self.prefill_tokens

    @property
    def remembered(self) -> int:
        """See ReplicaView."""
        return self.prefixes.remembered

    def cached_tokens(self, request: RoutedRequest) -> int:
        """See ReplicaView."""
        cached = self.prefixes.cached_tokens(request, self._now)
        if self._store is None:
            return cached
        behind = request.keys(self.block_size)[cached // self.block_size :]
        return cached + int(self._store_weight * self.block_size * self._store.leading(behind, self._now))
