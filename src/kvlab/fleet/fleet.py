"""A fleet: replicas behind a router, which together serve as one engine."""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

from kvlab.core import FinishReason, Request, StepRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.clock import LogicalClock
from kvlab.engine.protocol import EngineStats, FinishCallback, OutputCallback
from kvlab.errors import RequestRefusedError
from kvlab.fleet.base import Router
from kvlab.fleet.dispatcher import Dispatcher
from kvlab.fleet.holdings import Holdings
from kvlab.fleet.neighbours import NeighbourTier
from kvlab.fleet.prefixes import RoutedPrompt
from kvlab.fleet.replica import Asked, Replica, SimulatedView
from kvlab.fleet.scale import Scaler
from kvlab.fleet.split import Split
from kvlab.fleet.store import StoreSide
from kvlab.kv.audit import Finding


class _FleetClock(LogicalClock):
    """The time of the fleet's next event. Every replica has taken the steps that begin before it."""

    def set(self, when: float) -> None:
        """Set the time, also to an earlier one: a request that has just come may be due before what was next."""
        self._now = when


class Fleet(Dispatcher):
    """A ServingEngine of ServingEngines, each with a clock of its own.

    The replica that is due first steps first, of equals the one with the lowest number. A request is routed when it
    arrives, by what the router sees then: no step that begins later has been taken. So a run is the same on any
    machine. `is_open`: no request arrives because another has ended, so that a replica may take all steps up to the
    next arrival at once.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        views: Sequence[SimulatedView],
        router: Router,
        prefill_router: Router,
        *,
        is_open: bool = False,
    ) -> None:
        super().__init__(replicas, views, router, prefill_router)
        self.clock = _FleetClock()
        self.retried = 0  # requests that were lost with a replica and sent again
        self._is_open = is_open
        self._sessions: dict[str, str] = {}  # by request
        self._life_events = deque(router.config.events)
        for life in self._life_events:
            replicas[life.replica].may_die |= life.event == "die"
        self.scalers = [Scaler(rule, [replicas[each] for each in of]) for rule, of in router.config.rules]
        self.split: Split | None = None
        self.sides: dict[int, StoreSide] = {}  # of a store that replicas have in common
        self.neighbours: list[NeighbourTier] = []  # of each replica, what it can pull from the others
        self.holdings: Holdings | None = None  # who has what, where that is followed

    def submit(
        self, request: Request, on_output: OutputCallback | None = None, on_finish: FinishCallback | None = None
    ) -> None:
        """See ServingEngine. The arrival may lie in the future: the request is sent when it comes."""

        def arrive(when_s: float) -> None:
            self._arrive(asked, when_s)

        asked = Asked(request, on_output, on_finish or (lambda record: None), arrive)
        if self._life_events and self._life_events[0].at_s <= request.arrival_s <= self.clock.now():
            self._apply_until(request.arrival_s)
            self._advance()  # to what follows from a death before, which comes first
        if request.arrival_s > self.clock.now():
            self.serve_at(request.arrival_s, asked)
        else:
            self._serve_due(request.arrival_s)
            arrive(request.arrival_s)
        self._advance()

    def abort(self, request_id: str) -> bool:
        """See ServingEngine."""
        now = self.clock.now()
        place = next((n for n, due in enumerate(self._due) if due[2].request.request_id == request_id), None)
        if place is not None:
            _, _, asked = self._due.pop(place)
            heapq.heapify(self._due)
            asked.end(FinishReason.ABORTED, now)
        # Of two that have it the one that decodes, which comes behind, has the other let it go.
        is_here = place is not None or any(replica.abort(request_id, now) for replica in reversed(self.replicas))
        self._advance()
        return is_here

    def step(self) -> StepRecord | None:
        """See ServingEngine: a step of the replica that is due first."""
        self._receive()
        replica = self._first()
        if replica is None:
            return None
        record = replica.step()
        if self.split is not None and record is not None:
            self.split.stepped(replica, record)
        self._stepped(replica, [] if record is None else [record.end_s])
        return record

    def repeat(self, until_s: float) -> StepLog:
        """See Repeating: steps of the replica that is due first."""
        self._receive()
        replica = self._first()
        if replica is None:
            return StepLog()
        bound = min(until_s, self._next_due_s(), self._life_events[0].at_s if self._life_events else math.inf)
        if self.split is not None or self.sides or self.neighbours or not self._is_open:
            bound = min([bound, *(other.due_s for other in self.replicas if other is not replica)])
        records = replica.repeat(bound)
        if records:
            self._stepped(replica, records.column("end_s").tolist())
        return records

    def has_work(self) -> bool:
        """See ServingEngine."""
        return bool(self._due) or any(replica.engine.has_work() for replica in self.replicas)

    def next_wakeup(self) -> float | None:
        """See ServingEngine."""
        when = self._next_s()
        return None if when == math.inf else when

    def stats(self) -> EngineStats:
        """See ServingEngine: sums over the replicas, and the means of shares."""
        every = [replica.engine.stats() for replica in self.replicas]
        found: dict[str, float | None] = {}
        for name in (field.name for field in fields(EngineStats)):
            values = [getattr(figures, name) for figures in every]
            known = [value for value in values if value is not None]
            total = sum(known) if len(known) == len(values) else None
            found[name] = total / len(values) if total is not None and name.endswith("percent") else total
        stats = EngineStats(**found)  # type: ignore[arg-type]
        return replace(stats, waiting=stats.waiting + len(self._due))

    def audit(self) -> list[Finding]:
        """See Auditable."""
        return [
            replace(finding, detail=f"replica {replica.index}: {finding.detail}")
            for replica in self.replicas
            for finding in replica.engine.audit()
        ]

    def close(self) -> None:
        """See ServingEngine. Requests that have not ended are aborted."""
        now = self.clock.now()
        while self._due:
            heapq.heappop(self._due)[2].end(FinishReason.ABORTED, now)
        for replica in self.replicas:
            replica.engine.close()

    def _arrive(self, asked: Asked, now: float) -> None:
        """Let the router choose, and send the request there."""
        self._apply_until(now)
        request = asked.request
        name, earlier = request.request_id, request.follows
        session = self._sessions[name] = name if earlier is None else self._sessions.get(earlier, earlier)
        routed = RoutedPrompt(request, session)
        if self.split is not None and self.split.takes(request):
            self.split.begin(asked, routed, now)
            return
        self.replicas[self.choose(routed, now)].submit(asked, now)

    def _receive(self) -> None:
        """Apply the life events and decisions to scale, and serve the requests, that are due by now."""
        self._apply_until(self.clock.now())
        self._serve_due(self.clock.now())

    def _serve_due(self, now: float) -> None:
        """Serve the requests that are due by now, in their order."""
        while self._next_due_s() <= now:
            when_s, _, asked = heapq.heappop(self._due)
            try:
                asked.serve(when_s)
            except RequestRefusedError as error:
                asked.end(FinishReason.FAILED, when_s, str(error))

    def _apply_until(self, now: float) -> None:
        """Apply life events (die, drain, return) and decisions to scale up to now: before a step or a request."""
        if self.holdings is not None:
            self.holdings.until(now)
        for scaler in self.scalers:
            scaler.until(now)
        if self.scalers:
            self._forget(now, range(len(self.replicas)))
        while self._life_events and self._life_events[0].at_s <= now:
            life = self._life_events.popleft()
            replica = self.replicas[life.replica]
            replica.takes_requests = life.event == "return"
            if life.event == "die":
                self._die(replica, life.at_s)

    def _die(self, replica: Replica, now: float) -> None:
        """A replica loses all that it has. Its requests are served anew."""
        for neighbour in self.neighbours:
            neighbour.lose(replica.index, now)
        if (side := self.sides.get(replica.index)) is not None:
            side.lose(now)
        if self.split is not None:
            self.split.lose(replica.index, now)
        self.lost_tokens += replica.lost_tokens()
        for asked in replica.die():
            self.serve_at(now, asked)
            self.retried += 1
        self._forget(now, [replica.index])

    def _forget(self, now: float, replicas: Iterable[int]) -> None:
        """Tell `holdings` which contents these replicas have dropped between steps."""
        if self.holdings is not None:
            for replica in replicas:
                self.holdings.changed(replica, now)

    def _stepped(self, replica: Replica, ends_s: Sequence[float]) -> None:
        """A replica has taken steps that end then; none: there was nothing to do."""
        replica.settle(bool(ends_s))
        if ends_s:
            self.views[replica.index].prefixes.stepped(ends_s)
            if (side := self.sides.get(replica.index)) is not None:
                side.stepped(ends_s)
            if self.holdings is not None:
                self.holdings.stepped(replica.index, ends_s)
        else:
            self._forget(replica.engine.clock.now(), [replica.index])
        if self.neighbours:
            self.neighbours[replica.index].stepped()
        self._advance()

    def _first(self) -> Replica | None:
        """The replica that is due now, of several the first; none while its time has not come: a request may arrive
        before.
        """
        first = min(self.replicas, key=lambda replica: replica.due_s)
        return first if first.due_s <= self.clock.now() else None

    def _next_s(self) -> float:
        """When a replica or a request is due next; infinite if none is."""
        return min(self._next_due_s(), min(replica.due_s for replica in self.replicas))

    def _advance(self) -> None:
        """Set the clock to what is due next."""
        when = self._next_s()
        if when < math.inf:
            self.clock.set(when)
