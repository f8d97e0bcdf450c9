"""A fleet: replicas behind a router, which are one engine to whoever asks them to serve."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from kvlab.core import FinishReason, Request, StepRecord
from kvlab.engine.clock import LogicalClock
from kvlab.engine.core import EngineCore
from kvlab.engine.front_end import FrontEnd, end_unserved
from kvlab.engine.protocol import EngineStats, FinishCallback, OutputCallback
from kvlab.errors import ConfigError, RequestRefusedError
from kvlab.fleet.base import Choice, Router
from kvlab.fleet.prefixes import RoutedPrompt
from kvlab.fleet.replica import Replica, SimulatedView
from kvlab.kv.audit import Finding


@dataclass(frozen=True, slots=True)
class Routed:
    """A request that was sent to a replica, when and why."""

    request_id: str
    at_s: float
    choice: Choice


class _FleetClock(LogicalClock):
    """The time of the fleet's next event: every replica has done all that it begins before."""

    def set(self, when: float) -> None:
        """It is `when`, which may be earlier: what has just arrived may be due before what was next."""
        self._now = when


class Fleet:
    """A ServingEngine of ServingEngines, each with a clock of its own.

    The replica that is due first takes its step first; of equals the one of the lowest number. A request is sent as
    it arrives, by what the router sees then: no step that begins later has been taken. So a run is the same on any
    machine. `is_open`: no request comes because another has ended; a replica may then take the steps up to the next
    arrival at once.
    """

    def __init__(
        self,
        engines: Sequence[EngineCore | FrontEnd],
        router: Router,
        views: Sequence[SimulatedView] | None = None,
        *,
        is_open: bool = False,
    ) -> None:
        self.replicas = [Replica(index, engine) for index, engine in enumerate(engines)]
        self.router = router
        self.views = views or [SimulatedView(replica) for replica in self.replicas]
        self.clock = _FleetClock()
        self.routed: list[Routed] = []
        self._is_open = is_open
        self._coming: list[tuple[float, int, Request, OutputCallback | None, FinishCallback | None]] = []
        self._numbers = itertools.count()
        self._sessions: dict[str, str] = {}
        self._where: dict[str, int] = {}  # of requests that have not ended

    def submit(
        self, request: Request, on_output: OutputCallback | None = None, on_finish: FinishCallback | None = None
    ) -> None:
        """See ServingEngine. The arrival may lie in the future: the request is sent when it comes."""
        if request.arrival_s > self.clock.now():
            heapq.heappush(self._coming, (request.arrival_s, next(self._numbers), request, on_output, on_finish))
        else:
            self._send(request, on_output, on_finish)
        self._advance()

    def abort(self, request_id: str) -> bool:
        """See ServingEngine."""
        for coming in self._coming:
            if coming[2].request_id == request_id:
                self._coming.remove(coming)
                heapq.heapify(self._coming)
                if coming[4] is not None:
                    end_unserved(coming[2], coming[4], FinishReason.ABORTED, self.clock.now())
                return True
        index = self._where.get(request_id)
        return index is not None and self.replicas[index].engine.abort(request_id)

    def step(self) -> StepRecord | None:
        """See ServingEngine: a step of the replica that is due first."""
        self._receive()
        replica = self._first()
        if replica is None:
            return None
        record = replica.step()
        self._stepped(replica, record)
        return record

    def repeat(self, until_s: float) -> list[StepRecord]:
        """See Repeating: steps of the replica that is due first."""
        self._receive()
        replica = self._first()
        if replica is None or any(view.prefixes.needs_steps for view in self.views):
            return []
        bound = min(until_s, self._coming[0][0] if self._coming else math.inf)
        if not self._is_open:
            bound = min([bound, *(other.due_s for other in self.replicas if other is not replica)])
        records = replica.repeat(bound)
        if records:
            self._stepped(replica, records[-1])
        return records

    def has_work(self) -> bool:
        """See ServingEngine."""
        return bool(self._coming) or any(replica.engine.has_work() for replica in self.replicas)

    def next_wakeup(self) -> float | None:
        """See ServingEngine."""
        when = self._next_s()
        return None if when == math.inf else when

    def stats(self) -> EngineStats:
        """See ServingEngine: sums over the replicas, and the means of shares."""
        every = [replica.engine.stats() for replica in self.replicas]
        found: dict[str, float | None] = {}
        for name in (field.name for field in fields(EngineStats)):
            values = [getattr(each, name) for each in every]
            known = [value for value in values if value is not None]
            total = sum(known) if len(known) == len(values) else None
            found[name] = total / len(values) if total is not None and name.endswith("percent") else total
        stats = EngineStats(**found)  # type: ignore[arg-type]
        return replace(stats, waiting=stats.waiting + len(self._coming))

    def audit(self) -> list[Finding]:
        """See Auditable."""
        return [
            replace(finding, detail=f"replica {replica.index}: {finding.detail}")
            for replica in self.replicas
            for finding in replica.engine.audit()
        ]

    def close(self) -> None:
        """See ServingEngine."""
        self._coming.clear()
        for replica in self.replicas:
            replica.engine.close()

    def _send(self, request: Request, on_output: OutputCallback | None, on_finish: FinishCallback | None) -> None:
        """Let the router choose, as of the request's arrival."""
        now = request.arrival_s
        name, earlier = request.request_id, request.follows
        session = name if earlier is None else self._sessions.get(earlier, earlier)
        self._sessions[name] = session
        routed = RoutedPrompt(request, session)
        choice = self.router.choose(routed, [view.at(now) for view in self.views], now)
        if not 0 <= choice.replica < len(self.replicas):
            text = f"chose replica {choice.replica} for {name}, and there are {len(self.replicas)}, from 0 on"
            raise ConfigError("fleet.router", self.router.config.router, text)
        self.replicas[choice.replica].submit(request, on_output, on_finish, now)
        self.views[choice.replica].prefixes.sent(routed)
        self._where[name] = choice.replica
        self.routed.append(Routed(name, now, choice))

    def _receive(self) -> None:
        """Send what has arrived by now."""
        while self._coming and self._coming[0][0] <= self.clock.now():
            now, _, request, on_output, on_finish = heapq.heappop(self._coming)
            try:
                self._send(request, on_output, on_finish)
            except RequestRefusedError as error:
                if on_finish is not None:
                    end_unserved(request, on_finish, FinishReason.FAILED, now, str(error))
        self._advance()

    def _stepped(self, replica: Replica, record: StepRecord | None) -> None:
        replica.settle(record is not None)
        if record is not None:
            self.views[replica.index].prefixes.stepped(record.end_s)
        self._advance()

    def _first(self) -> Replica | None:
        """The replica that is due first, if any is; none while a request comes before."""
        first = min(self.replicas, key=lambda replica: replica.due_s)
        return first if first.due_s < math.inf and first.due_s <= self._next_s() else None

    def _next_s(self) -> float:
        """When the next thing happens that is known of."""
        times = [replica.due_s for replica in self.replicas]
        return min([*times, self._coming[0][0]] if self._coming else times)

    def _advance(self) -> None:
        when = self._next_s()
        if when < math.inf:
            self.clock.set(when)
