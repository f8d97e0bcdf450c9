"""A search for the replicas that should compute prompts alone: `kvlab tune find=split`."""

from __future__ import annotations

from collections.abc import Generator

from kvlab.config import RunConfig
from kvlab.errors import ConfigError
from kvlab.lab.campaigns.tune.limit_search import GOODPUT
from kvlab.lab.campaigns.tune.rate import Bracket, RateRange
from kvlab.lab.campaigns.tune.replica_search import ReplicaSearch
from kvlab.lab.campaigns.tune.settings import TuneSettings
from kvlab.lab.results.tables import count


class SplitSearch(ReplicaSearch):
    """Tries every split of `fleet.replicas` into some that compute prompts and others that decode, and none, for
    the most requests a second within their limits.
    """

    find = files = "split"
    column = "prefill : decode"

    def range_of(self, config: RunConfig, settings: TuneSettings) -> RateRange:
        super().range_of(config, settings)
        replicas = config.fleet.replicas
        if replicas < 2:
            text = "leaves nothing to split; find=split needs at least 2, of which it tries each split"
            raise ConfigError("fleet.replicas", replicas, text)
        return RateRange("fleet.prefill", 0, 0, replicas - 1)

    def question(self, limits: str) -> str:
        return (
            f"the {self.range.key} of {self.replicas(0)} replicas with the most requests a second within {limits}"
        )

    def tries(self) -> Generator[float, bool, Bracket]:
        """All: goodput over the split may have several tops, as prompts and outputs come."""
        for prefill in range(int(self.range.high) + 1):
            _ = yield prefill  # it is sent whether that holds
        best = min(self.ended, key=lambda prefill: (-self.ended[prefill].metrics[GOODPUT], prefill))
        return Bracket(best if self.ended[best].metrics[GOODPUT] else None)

    def result(self, found: Bracket) -> list[str]:
        self._print_table()
        if found.holds is None:
            text = "no split has a request within its limits; take wider limits, or more replicas"
            return [f"{text} (fleet.replicas)"]
        best = f"best: {self.named(found.holds)} ({self.point(found.holds)}): {self.shares(found.holds)}"
        errors = self.errors(found.holds)
        return [f"{best}; of {count(len(self.ended), 'run')}", *errors, self.command(found.holds)]

    def named(self, value: float) -> str:
        prefill, replicas = int(value), self.base.config.fleet.replicas
        return f"{prefill} : {replicas - prefill}" if prefill else "no split"

    def replicas(self, value: float) -> int:
        return self.base.config.fleet.replicas
