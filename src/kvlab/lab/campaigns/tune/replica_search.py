"""A search for the least number of replicas: `kvlab tune find=replicas`."""

from __future__ import annotations

from collections.abc import Generator

from kvlab.config import RunConfig
from kvlab.errors import ConfigError
from kvlab.lab.campaigns.tune.limit_search import GOODPUT, LimitSearch
from kvlab.lab.campaigns.tune.rate import Bracket, RateRange
from kvlab.lab.campaigns.tune.settings import TuneSettings
from kvlab.lab.results.metrics import ATTAINMENT
from kvlab.lab.results.tables import count, new_table

_MOST = 64  # replicas that are tried, unless fleet.replicas says


class ReplicaSearch(LimitSearch):
    """Finds the least number of replicas that keeps `attainment` percent of the requests within their limits."""

    find, files, asked = "replicas", "replicas", "the least"
    column = "replicas"  # of the table, what was tried

    def range_of(self, config: RunConfig, settings: TuneSettings) -> RateRange:
        if not config.slo.limits:
            text = "needs a limit; set slo.ttft_ms, slo.tpot_ms or both, in milliseconds"
            raise ConfigError("find", self.find, text)
        if config.engine.kind != "kvlab":
            text = f"takes replicas of kvlab's own engine, and engine={config.engine.kind} is another"
            raise ConfigError("find", self.find, text)
        if config.fleet.groups:
            text = f"find={self.find} searches a number of equal replicas; sweep over fleet.groups instead"
            raise ConfigError("fleet.groups", ", ".join(group.name for group in config.fleet.parts), text)
        most = config.fleet.replicas
        return RateRange("fleet.replicas", 1, 1, most if most > 1 else _MOST)

    def tries(self) -> Generator[float, bool, Bracket]:
        return least(int(self.range.high))

    def answers(self, limits: Bracket) -> bool:
        return limits.holds is not None

    def result(self, limits: Bracket) -> list[str]:
        self._print_table()
        if limits.holds is None:
            most = max(self.ended)
            has = f"even {self.point(most)}, the most tried, has {self.shares(most)}"
            return [f"no number of replicas holds: {has}; take wider limits, or allow more (fleet.replicas=MOST)"]
        held = f"least: {self.point(limits.holds)}: {self.shares(limits.holds)}"
        below = [f"below it: {self.point(limits.fails)}: {self.shares(limits.fails)}"] if limits.fails else []
        errors = self.errors(limits.holds, min)
        return [f"{held}; found in {count(len(self.ended), 'run')}", *below, *errors, self.command(limits.holds)]

    def named(self, value: float) -> str:
        """What was tried, in the table."""
        return f"{value:g}"

    def replicas(self, value: float) -> int:
        """How many serve then."""
        return int(value)

    def _print_table(self) -> None:
        """A row for each value that was tried."""
        table = new_table(self.column, "devices", "within", "goodput", "of a device", "ttft p99", "tpot p99")
        for value, ended in sorted(self.ended.items()):
            devices = self.replicas(value) * self.base.config.executor.devices
            metrics, goodput = ended.metrics, ended.metrics[GOODPUT]
            times = (metrics.get(f"latency/{name}_ms_p99") for name in ("ttft", "tpot"))
            table.add_row(
                self.named(value),
                f"{devices:,}",
                f"{metrics[ATTAINMENT]:.1f} %",
                f"{goodput:.2f} req/s",
                f"{goodput / devices:.3f}",
                *("-" if time is None else f"{time:,.0f} ms" for time in times),
            )
        self.console.print(table)


def least(most: int) -> Generator[float, bool, Bracket]:
    """Yields the numbers to try and is sent whether each holds: 1, 2, 4 and so on up to `most` until one holds,
    then the middle between that and the largest that does not.
    """
    holds: int | None = None
    fails: int | None = None
    number = 1
    while True:
        if (yield number):
            holds = number
        else:
            fails = number
        if holds is None:
            if number >= most:
                return Bracket(None, fails)
            number = min(2 * number, most)
        elif holds - (fails or 0) <= 1:
            return Bracket(holds, fails)
        else:
            number = (holds + (fails or 0)) // 2
