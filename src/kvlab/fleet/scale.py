"""Replicas that start and stop by a rule, as their load asks for."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvlab.config.fleet import ScaleConfig
from kvlab.fleet.replica import Replica

_TOLERANCE = 0.1  # of Kubernetes' HorizontalPodAutoscaler: so near to the target nothing changes


class Scaled(NamedTuple):
    """What became of a replica: start, when its warm-up begins; drain; stop, when its last request has ended."""

    at_s: float
    event: str
    replica: int


@dataclass(slots=True)
class _Place:
    """A replica that the rule starts and stops. It is off, warms up, serves, or drains."""

    replica: Replica
    since_s: float | None = None  # its start; None: it is off
    ready_s: float = math.inf  # when its warm-up ends; infinite: it gets no requests


class Scaler:
    """Decides every `every_s`, from the loads of that moment, how many replicas there are to be: a metric, summed
    over those that serve, divided by its target for each (Kubernetes' HorizontalPodAutoscaler). If more are wanted,
    others start and serve after their warm-up, with empty caches. If fewer are, and no decision of the last
    `down_s` wanted more, those with the highest numbers drain.
    """

    def __init__(self, config: ScaleConfig, replicas: Sequence[Replica]) -> None:
        self._config = config
        self._places = [_Place(replica) for replica in replicas]
        for place in self._places[: config.least]:
            place.since_s = place.ready_s = 0.0
        self._wanted = deque[tuple[float, int]]()  # by the decisions of the last `down_s`
        self._decisions = 0
        self._change_s = 0.0  # when replicas may next begin or cease to take requests
        self.events: list[Scaled] = []
        self.replica_s = 0.0  # of those that have stopped, from start to stop

    def until(self, now: float) -> None:
        """Take the decisions up to now. Steps that begin before have been taken, and none that begins later."""
        while self._change_s <= now:
            if self._change_s == self._next_s:
                self._decisions += 1
                self._decide(self._change_s)
            for place in self._places:
                place.replica.takes_requests = place.ready_s <= self._change_s
            ready = [place.ready_s for place in self._places if self._change_s < place.ready_s < math.inf]
            self._change_s = min([self._next_s, *ready])

    def finish(self, end_s: float) -> float:
        """The seconds of all replicas, from start to stop or the end of the run."""
        self.until(end_s)
        return self.replica_s + sum(end_s - place.since_s for place in self._places if place.since_s is not None)

    @property
    def _next_s(self) -> float:
        """When the next decision is."""
        return (self._decisions + 1) * self._config.every_s

    def _decide(self, now: float) -> None:
        """Let as many replicas start, drain or stop as the load asks for."""
        for place in self._places:
            drains = place.since_s is not None and place.ready_s == math.inf
            if drains and not place.replica.in_flight(now) and not place.replica.core.is_keeping:
                self._stop(place, now)
        there = [place for place in self._places if place.ready_s < math.inf]
        wanted = self._count(len(there), now)
        for place in reversed(there[wanted:]):
            is_warm, place.ready_s = place.ready_s <= now, math.inf
            if is_warm:
                self.events.append(Scaled(now, "drain", place.replica.index))
            else:
                self._stop(place, now)
        off = [place for place in self._places if place.since_s is None]
        for place in off[: max(wanted - len(there), 0)]:
            place.since_s, place.ready_s = now, now + self._config.warm_up_s
            place.replica.forget()
            self.events.append(Scaled(now, "start", place.replica.index))

    def _count(self, there: int, now: float) -> int:
        """How many replicas there are to be from now on, of which so many are `there`."""
        config, total, wanted = self._config, self._total(now), there
        if abs(total / (config.target_given * there) - 1) > _TOLERANCE:
            wanted = max(config.least, min(math.ceil(total / config.target_given), len(self._places)))
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - config.down_s:
            self._wanted.popleft()
        return wanted if wanted >= there else min(max(count for _, count in self._wanted), there)

    def _total(self, now: float) -> float:
        """The rule's metric, summed over the replicas that serve."""
        if self._config.on == "rate":
            since_s = now - self._config.every_s
            return sum(place.replica.sent_between(since_s, now) for place in self._places) / self._config.every_s
        before = math.nextafter(now, -math.inf)  # no step that begins now, taken at once with others or not
        serving = [place.replica for place in self._places if place.ready_s <= now]
        loads = [(replica, replica.load_at(before)) for replica in serving]
        if self._config.on == "kv":
            return sum(load.kv_usage for _, load in loads)
        return sum(load.waiting + replica.sent_between(load.start_s, now) for replica, load in loads)

    def _stop(self, place: _Place, now: float) -> None:
        self.replica_s += now - (place.since_s or 0.0)
        place.since_s = None
        self.events.append(Scaled(now, "stop", place.replica.index))
