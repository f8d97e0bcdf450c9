"""The searches of `kvlab tune find=`: the largest arrival rate, the least number of replicas, the best split."""

import re
from collections.abc import Generator

from kvlab.config import RunConfig, WorkloadConfig
from kvlab.config.fleet import FleetConfig
from kvlab.config.groups import ROLES, read_groups, with_settings
from kvlab.errors import ConfigError
from kvlab.lab.campaigns.tune.limit_search import Bracket, LimitSearch, RateRange, share_text
from kvlab.lab.campaigns.tune.settings import TuneSettings
from kvlab.lab.results.metrics import ATTAINMENT, GOODPUT
from kvlab.lab.results.tables import count, new_table

SPAN = 32.0  # times the rate that the workload has, up and down, where no bounds are given
_DIGITS = 4  # of a rate
_MOST = 64  # replicas that are tried, unless fleet.replicas says
_LEAST_GAIN = 0.5  # percent of the requests; of less it is said that more replicas do not help


class RateSearch(LimitSearch):
    """Finds the largest rate that keeps `attainment` percent of the requests within their limits."""

    find, files, asked = "rate", "rates", "the largest"

    def range_of(self, config: RunConfig, settings: TuneSettings) -> RateRange:
        return rate_range(config.workload, settings.rates)

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


def rate_range(workload: WorkloadConfig, bounds: str | None = None) -> RateRange:
    """The range of a workload. `bounds` are the lowest and the highest rate, as 0.5-20. Raises ConfigError for one
    without an arrival rate.
    """
    if workload.concurrency is not None:
        text = "a closed loop has no arrival rate that could be found; leave it out"
        raise ConfigError("workload.concurrency", workload.concurrency, text)
    if workload.source == "jsonl":
        text = "the file says when its requests arrive; find=rate needs arrivals that have a rate"
        raise ConfigError("workload.source", workload.source, text)
    if workload.arrival == "burst":
        text = "all requests at once have no rate that could be found; set workload.arrival=poisson workload.rate=1"
        raise ConfigError("workload.arrival", workload.arrival, text)
    if workload.arrival == "trace":
        key, start = "workload.rate_scale", workload.rate_scale
    else:
        key, start = "workload.rate", workload.rate or 1.0
    if bounds is None:
        return RateRange(key, start, start / SPAN, start * SPAN)
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(f"{number}-{number}", bounds)
    low, high = (float(match[1]), float(match[2])) if match else (0.0, 0.0)
    if not 0 < low < high:
        raise ConfigError("rates", bounds, "write the lowest and the highest rate to try, as 0.5-20")
    return RateRange(key, min(max(start, low), high), low, high)


def bracket(asked: RateRange, precision: float) -> Generator[float, bool, Bracket]:
    """Yields the rates to try and is sent whether each holds: doubled or halved from the start on until one holds
    and another does not, then the geometric mean of these, until they are within `precision` percent.
    """
    holds: float | None = None
    fails: float | None = None
    rate = asked.start
    while True:
        if (yield rate):
            holds = rate
        else:
            fails = rate
        if holds is None:
            if rate <= asked.low:
                return Bracket(None, fails)
            rate = max(_rounded(rate / 2), asked.low)
        elif fails is None:
            if rate >= asked.high:
                return Bracket(holds, None)
            rate = min(_rounded(rate * 2), asked.high)
        else:
            rate = _rounded((holds * fails) ** 0.5)
            if fails <= holds * (1 + precision / 100) or not holds < rate < fails:
                return Bracket(holds, fails)


def _rounded(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")


class ReplicaSearch(LimitSearch):
    """Finds the least number of replicas that keeps `attainment` percent of the requests within their limits."""

    find, files, asked = "replicas", "replicas", "the least"
    column = "replicas"  # of the table, what was tried

    def range_of(self, config: RunConfig, settings: TuneSettings) -> RateRange:
        if config.engine.kind != "kvlab":
            text = f"takes replicas of kvlab's own engine, and engine={config.engine.kind} is another"
            raise ConfigError("find", self.find, text)
        return self.range_in(config.fleet)

    def range_in(self, fleet: FleetConfig) -> RateRange:
        """The setting of a fleet that is searched, and its bounds. Raises ConfigError where it has none."""
        most, parts = fleet.replicas, fleet.parts
        if not parts:
            return RateRange("fleet.replicas", 1, 1, most if most > 1 else _MOST)
        growing = [group for group in parts if group.grows]
        if not growing:
            text = (
                "find=replicas lets one group grow: leave its count out, and give fleet.replicas, the most of all"
            )
            raise ConfigError("fleet.groups", ", ".join(group.name for group in parts), text)
        low = most - growing[-1].replicas + 1
        return RateRange("fleet.replicas", low, low, most)

    def tries(self) -> Generator[float, bool, Bracket]:
        return least(int(self.range.low), int(self.range.high))

    def answers(self, limits: Bracket) -> bool:
        return limits.holds is not None

    def result(self, limits: Bracket) -> list[str]:
        self._print_table()
        if limits.holds is None:
            most = max(self.ended)
            nearest = max(sorted(self.ended), key=lambda value: self.ended[value].metrics[ATTAINMENT])
            if self.ended[nearest].metrics[ATTAINMENT] > self.ended[most].metrics[ATTAINMENT]:
                near = f"{self.point(nearest)} comes nearest, {self.shares(nearest)}"
                more = f"more are not better here: {self.point(most)} has {self.shares(most)}"
                return [f"none of those tried holds: {near}; {more}; take wider limits, or another fleet.router"]
            has = f"even {self.point(most)}, the most tried, has {self.shares(most)}"
            advice = "take wider limits, or allow more (fleet.replicas=MOST)"
            within = {value: ended.metrics[ATTAINMENT] for value, ended in self.ended.items()}
            before = max((value for value in within if value < most), default=None)
            if before is not None and within[most] - within[before] < _LEAST_GAIN:
                advice = f"{self.point(before)} keeps as many, so that more do not help: take wider limits, or "
                advice += "make each faster (executor.tensor_parallel, hardware)"
            return [f"no number of replicas holds: {has}; {advice}"]
        held = f"least: {self.point(limits.holds)}: {self.shares(limits.holds)}"
        below = [f"below it: {self.point(limits.fails)}: {self.shares(limits.fails)}"] if limits.fails else []
        errors = self.errors(limits.holds, min)
        return [f"{held}; found in {count(len(self.ended), 'run')}", *below, *errors, self.command(limits.holds)]

    def advised(self, limits: Bracket) -> float | None:
        # The words have no number of replicas, but that of those which a split divides.
        most = max(self.ended, default=None) if self.find == "replicas" else None
        return most if limits.holds is None else limits.holds

    def named(self, value: float) -> str:
        """What was tried, in the table."""
        return f"{value:g}"

    def fleet(self, value: float) -> tuple[int, int]:
        """How many serve then, and how many of them prefill alone."""
        return int(value), self.config.fleet.prefill

    def devices(self, value: float) -> int:
        """Of all that serve then."""
        config, (replicas, prefill) = self.config, self.fleet(value)
        groups = read_groups(config.fleet.groups, replicas, prefill)
        own = [group.replicas * with_settings(config, group.settings).executor.devices for group in groups]
        return sum(own) if groups else replicas * config.executor.devices

    def _print_table(self) -> None:
        """A row for each value that was tried."""
        table = new_table(self.column, "devices", "within", "goodput", "of a device", "ttft p99", "tpot p99")
        for value, ended in sorted(self.ended.items()):
            devices, metrics, goodput = self.devices(value), ended.metrics, ended.metrics[GOODPUT]
            times = (metrics.get(f"latency/{name}_ms_p99") for name in ("ttft", "tpot"))
            table.add_row(
                self.named(value),
                f"{devices:,}",
                share_text(metrics[ATTAINMENT], self.wanted),
                f"{goodput:.2f} req/s",
                f"{goodput / devices:.3f}",
                *("-" if time is None else f"{time:,.0f} ms" for time in times),
            )
        self.console.print(table)


def least(low: int, most: int) -> Generator[float, bool, Bracket]:
    """Yields the numbers to try and is sent whether each holds: `low`, then 1, 3, 7 and so on more, `most` at the
    end, until one holds, then the middle between that and the largest that does not.
    """
    holds: int | None = None
    fails: int | None = None
    number = low
    while True:
        if (yield number):
            holds = number
        else:
            fails = number
        if holds is None:
            if number >= most:
                return Bracket(None, fails)
            number = min(2 * number - low + 1, most)
        elif holds - (fails or low - 1) <= 1:
            return Bracket(holds, fails)
        else:
            number = (holds + (fails or low - 1)) // 2


class SplitSearch(ReplicaSearch):
    """Tries every split of `fleet.replicas` into some that compute prompts and others that decode, and none, for
    the most requests a second within their limits.
    """

    find = files = "split"
    column = "prefill : decode"

    def range_in(self, fleet: FleetConfig) -> RateRange:
        if fleet.replicas < 2:
            text = "leaves nothing to split; find=split needs at least 2, of which it tries each split"
            raise ConfigError("fleet.replicas", fleet.replicas, text)
        parts = fleet.parts
        if not any(group.role for group in parts):
            return RateRange("fleet.prefill", 0, 0, fleet.replicas - 1)
        if sum(group.grows for group in parts) < 2:
            text = (
                "find=split needs one of each role without a count, which share what others leave of fleet.replicas"
            )
            raise ConfigError("fleet.groups", ", ".join(group.name for group in parts), text)
        fixed = {role: sum(g.replicas for g in parts if g.role == role and not g.grows) for role in ROLES}
        low = fixed["prefill"] + 1
        return RateRange("fleet.prefill", low, low, fleet.replicas - fixed["decode"] - 1)

    def question(self, limits: str) -> str:
        replicas, _ = self.fleet(0)
        return f"the {self.range.key} of {replicas} replicas with the most requests a second within {limits}"

    def tries(self) -> Generator[float, bool, Bracket]:
        """All: goodput over the split may have several tops, as prompts and outputs come."""
        for prefill in range(int(self.range.low), int(self.range.high) + 1):
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
        prefill, replicas = int(value), self.config.fleet.replicas
        return f"{prefill} : {replicas - prefill}" if prefill else "no split"

    def fleet(self, value: float) -> tuple[int, int]:
        return self.config.fleet.replicas, int(value)
