"""A search for the largest arrival rate: `kvlab tune find=rate`."""

from __future__ import annotations

from collections.abc import Generator

from kvlab.config import RunConfig
from kvlab.lab.campaigns.tune.limit_search import LimitSearch
from kvlab.lab.campaigns.tune.rate import Bracket, RateRange, bracket, rate_range
from kvlab.lab.campaigns.tune.settings import TuneSettings
from kvlab.lab.results.tables import count


class RateSearch(LimitSearch):
    """Finds the largest rate that keeps `attainment` percent of the requests within their limits."""

    find, files, asked = "rate", "rates", "the largest"

    def range_of(self, config: RunConfig, settings: TuneSettings) -> RateRange:
        return rate_range(config, settings.rates)

    def tries(self) -> Generator[float, bool, Bracket]:
        return bracket(self.range, self.precision)

    def answers(self, limits: Bracket) -> bool:
        return limits.holds is not None and limits.fails is not None

    def span(self) -> str:
        return f"{super().span()}, to {self.precision:g} %"

    def result(self, limits: Bracket) -> list[str]:
        if limits.holds is None:
            least = min(self.ended)
            has = f"even {self.point(least)}, the lowest rate tried, has {self.shares(least)}"
            return [f"no rate holds: {has}; take wider limits, or try lower ones (rates=LOW-HIGH)"]
        holds = f"{self.point(limits.holds)}{self._per_second(limits.holds)}"
        if limits.fails is None:
            has = f"even {holds}, the highest rate tried, has {self.shares(limits.holds)}"
            return [f"every rate holds: {has}; take more requests, or try higher ones (rates=LOW-HIGH)"]
        return [
            f"largest: {holds}: {self.shares(limits.holds)}; found in {count(len(self.ended), 'run')}",
            f"above it: {self.point(limits.fails)}: {self.shares(limits.fails)}",
            *self.errors(limits.holds, max),
            self.command(limits.holds),
        ]

    def _per_second(self, rate: float) -> str:
        """Of a trace: how many requests arrive per second at this scale."""
        if self.range.key == "workload.rate":
            return ""
        profile = self.summary(rate).get("workload") or {}
        last = profile.get("last_arrival_s")
        return f" ({profile['num_rows'] / last:.3g} requests per second)" if last else ""
