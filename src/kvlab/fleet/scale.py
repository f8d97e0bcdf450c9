"""Replicas that start and stop by a rule, as their load asks for."""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvlab.config.fleet import ScaleConfig
from kvlab.fleet.replica import Replica

_TOLERANCE = 0.1  # of Kubernetes' HorizontalPodAutoscaler: so near to the target nothing changes


class Scaled(NamedTuple):
    """What became of a replica: start, which is the begin of its warm-up; drain; stop, when it has ended all."""

    at_s: float
    event: str
    replica: int


class Scaler:
    """Decides every `every_s`, from the loads of that moment, how many replicas there are to be: the sum of what is
    looked at over those that serve, divided by its target for each (Kubernetes' HorizontalPodAutoscaler). If it is
    more, others start and serve after their warm-up, with empty caches; if it is fewer, and no decision of the last
    `down_s` wanted more, those of the highest numbers drain.
    """

    def __init__(self, config: ScaleConfig, replicas: Sequence[Replica]) -> None:
        self._config, self._replicas = config, replicas
        serve = [index < config.least for index in range(len(replicas))]
        self._ready_s = [0.0 if serves else math.inf for serves in serve]  # infinite: it gets no requests
        self._since_s = [0.0 if serves else None for serves in serve]  # its start; None: it is not there
        self._wanted = deque[tuple[float, int]]()
        self._decisions = 0
        self._change_s = 0.0  # the next time that it may change who takes requests
        self.events: list[Scaled] = []
        self.replica_s = 0.0  # of those that have stopped, from start to stop

    def until(self, now: float) -> None:
        """Take the decisions up to now. Steps that begin before have been taken, and none that begins later."""
        while self._change_s <= now:
            if self._change_s == self._next_s:
                self._decisions += 1
                self._decide(self._change_s)
            for replica, ready_s in zip(self._replicas, self._ready_s, strict=True):
                replica.takes_requests = ready_s <= self._change_s
            ready = [ready_s for ready_s in self._ready_s if self._change_s < ready_s < math.inf]
            self._change_s = min([self._next_s, *ready])

    def finish(self, end_s: float) -> float:
        """The seconds of all replicas, from start to stop or the end of the run."""
        self.until(end_s)
        return self.replica_s + sum(end_s - since_s for since_s in self._since_s if since_s is not None)

    @property
    def _next_s(self) -> float:
        return (self._decisions + 1) * self._config.every_s

    def _decide(self, now: float) -> None:
        for index, replica in enumerate(self._replicas):
            drains = self._since_s[index] is not None and self._ready_s[index] == math.inf
            if drains and not replica.in_flight(now) and not replica.core.is_keeping:
                self._stop(index, now)
        there = [index for index, ready_s in enumerate(self._ready_s) if ready_s < math.inf]
        total, config = self._total(now), self._config
        wanted = len(there)
        if abs(total / (config.target_given * wanted) - 1) > _TOLERANCE:
            wanted = max(config.least, min(math.ceil(total / config.target_given), len(self._replicas)))
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - config.down_s:
            self._wanted.popleft()
        if wanted < len(there):
            wanted = min(max(number for _, number in self._wanted), len(there))
        for index in reversed(there[wanted:]):
            is_warm = self._ready_s[index] <= now
            self._ready_s[index] = math.inf
            if is_warm:
                self.events.append(Scaled(now, "drain", self._replicas[index].index))
            else:
                self._stop(index, now)
        stopped = [index for index, since_s in enumerate(self._since_s) if since_s is None]
        for index in stopped[: max(wanted - len(there), 0)]:
            self._since_s[index], self._ready_s[index] = now, now + config.warm_up_s
            self._replicas[index].forget()
            self.events.append(Scaled(now, "start", self._replicas[index].index))

    def _total(self, now: float) -> float:
        """What is looked at, summed over the replicas that serve."""
        if self._config.on == "rate":
            since_s = now - self._config.every_s
            return sum(replica.sent_between(since_s, now) for replica in self._replicas) / self._config.every_s
        serving = [
            replica for replica, ready_s in zip(self._replicas, self._ready_s, strict=True) if ready_s <= now
        ]
        before = math.nextafter(now, -math.inf)  # no step that begins now, taken at once with others or not
        loads = [replica.load_at(before) for replica in serving]
        if self._config.on == "kv":
            return sum(load.kv_usage for load in loads)
        queued = zip(serving, loads, strict=True)
        return sum(load.waiting + replica.sent_between(load.start_s, now) for replica, load in queued)

    def _stop(self, index: int, now: float) -> None:
        self.replica_s += now - (self._since_s[index] or 0.0)
        self._since_s[index] = None
        self.events.append(Scaled(now, "stop", self._replicas[index].index))
