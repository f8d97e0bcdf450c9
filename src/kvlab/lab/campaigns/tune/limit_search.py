"""A search along one setting for where requests cease to be within their limits: what it runs, prints and keeps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvlab.config import RunConfig
from kvlab.config.effects import without_effect
from kvlab.config.groups import with_settings
from kvlab.errors import ConfigError, OutputError
from kvlab.lab.advice_line import advice_line, drawn_requests
from kvlab.lab.campaigns.tune.settings import TuneSettings
from kvlab.lab.campaigns.tune.trials import Compose, Ended, Trials
from kvlab.lab.files import attempt, write_csv, write_text
from kvlab.lab.results.catalogue import metric
from kvlab.lab.results.load import offered_load
from kvlab.lab.results.metrics import ATTAINMENT, GOODPUT
from kvlab.lab.results.provenance import config_digest
from kvlab.lab.results.records import read_run, read_summary
from kvlab.lab.results.sureness import ACCURACY, how_far_off
from kvlab.lab.run.fleet import check_fleet
from kvlab.lab.run.peer_plan import plan_any
from kvlab.lab.settings import key_of, run_command
from kvlab.lab.terminal import Terminal
from kvlab.run_files import ADVICE, SEARCH

_COLUMNS = (
    ATTAINMENT, "slo/ttft_attainment", "slo/tpot_attainment", GOODPUT, "latency/ttft_ms_p99", "latency/tpot_ms_p99",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RateRange:
    """The setting that is the rate, where the search begins, and between which bounds it stays."""

    key: str  # workload.rate, of arrivals that are drawn; workload.rate_scale, of a trace's own
    start: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Bracket:
    """What a search found: the largest rate that was tried and holds, and the smallest that does not. None: no rate
    within the bounds does.
    """

    holds: float | None = None
    fails: float | None = None


def share_text(share: float, wanted: float) -> str:
    """A share in percent, with as many digits as tell whether it is what is wanted."""
    texts = (f"{share:.{digits}f}" for digits in range(1, 12))
    told = (text for text in texts if (float(text) >= wanted) == (share >= wanted))
    return f"{next(told, f'{share!r}')} %"


class LimitSearch(ABC):
    """Finds the last value of a setting that keeps `attainment` percent of the requests within their limits."""

    find: ClassVar[str]  # what is found: find=rate
    files: ClassVar[str]  # the name of its table and its picture
    asked: ClassVar[str]  # the setting's value that is sought, in words

    def __init__(
        self, settings: TuneSettings, overrides: Sequence[str], compose: Compose, console: Terminal
    ) -> None:
        self.wanted, self.precision, self.console = settings.attainment, settings.precision, console
        self.config = config = compose(overrides).config
        if not config.slo.limits:
            text = "needs a limit; set slo.ttft_ms, slo.tpot_ms or both, in milliseconds"
            raise ConfigError("find", self.find, text)
        self.range = self.range_of(config, settings)
        first, last = (with_settings(config, {self.range.key: end}) for end in (self.range.low, self.range.high))
        for part in plan_any(config).parts:  # what cannot run is refused before the search is recorded
            check_fleet(part.plan, last.fleet)
        self.words = [text for text in overrides if key_of(text) != self.range.key]
        parts = [self.find, config_digest(config, any_repeat=True), settings.rates or ""]
        self.runs = Trials(self.find, parts, config, self.words, settings.output, compose, console)
        self.ended: dict[float, Ended] = {}
        # As a router of one replica: what other runs of the search read is nothing to change.
        self.runs.said |= set(without_effect(first)) - set(without_effect(last))

    @abstractmethod
    def range_of(self, config: RunConfig, settings: TuneSettings) -> RateRange:
        """The setting and its bounds. Raises ConfigError where it cannot be searched."""

    @abstractmethod
    def tries(self) -> Generator[float, bool, Bracket]:
        """Yields the values to try and is sent whether each holds."""

    @abstractmethod
    def answers(self, limits: Bracket) -> bool:
        """Whether that is what was asked for."""

    @abstractmethod
    def result(self, limits: Bracket) -> list[str]:
        """What came of it, in sentences."""

    def run(self) -> int:
        """Search, report, draw. Returns the exit code."""
        limits = " and ".join(f"{name} {most:g} ms" for name, most in self.config.slo.limits.items())
        print(self.question(limits))
        print(self.span(), flush=True)
        self.runs.open_parent({"tune.find": self.find, "tune.attainment": self.wanted})
        answer, problem = self._search()
        self._finish(answer, problem)
        return self.runs.exit_code(found=self.answers(answer))

    def question(self, limits: str) -> str:
        """What is asked, in words."""
        return f"{self.asked} {self.range.key} that keeps {self.wanted:g} % of requests within {limits}"

    def span(self) -> str:
        """Between which values it searches."""
        return f"from {self.range.low:g} to {self.range.high:g}, beginning at {self.range.start:g}"

    def shares(self, value: float) -> str:
        """Attainment, that of each limit where there are two, and goodput."""
        metrics = self.ended[value].metrics
        alone = {name: metrics.get(f"slo/{name}_attainment") for name in ("ttft", "tpot")}
        both = [f"{name} {share_text(share, self.wanted)}" for name, share in alone.items() if share is not None]
        within = f"{share_text(metrics[ATTAINMENT], self.wanted)} within"
        within += f" ({', '.join(both)})" if len(both) > 1 else ""
        return f"{within}, goodput {metric(GOODPUT).text(metrics.get(GOODPUT))}"

    def point(self, value: float) -> str:
        """The setting with a value."""
        return f"{self.range.key}={value:g}"

    def command(self, value: float) -> str:
        """The run of a value, as a user types it."""
        return run_command([*self.words, self.point(value)])

    def advised(self, limits: Bracket) -> float | None:
        """The value of the deployment that advice would be asked for; None: as the words have it."""
        return limits.holds

    def folder(self, value: float) -> Path:
        """Where the results of a value are; of several repeats those of the first."""
        return self.runs.first(f"{value:g}")

    def errors(self, found: float, choose: Callable[[Iterable[float]], float] | None = None) -> list[str]:
        """How far the figures of the value that was found may be off, and which of those tried `choose` (max, min)
        would find then; nothing of runs that are not timed by measured operations.
        """
        text = how_far_off([self.summary(found)])
        if text is None or choose is None:
            return [text] if text else []
        ends = []
        for end in (0, 1) if choose is max else (1, 0):  # latencies are longer, or shorter
            held = []
            for value, ended in self.ended.items():
                attainment = self.summary(value).get(ACCURACY, {}).get("attainment")
                if (attainment[end] if attainment else ended.metrics[ATTAINMENT]) >= self.wanted:
                    held.append(value)
            least, most = min(self.ended), max(self.ended)
            none = f"less than {least:g}" if choose is max else f"more than {most:g}"
            ends.append(f"{choose(held):g}" if held else none)
        return [f"{text}; then {self.range.key} is {' to '.join(dict.fromkeys(ends))}, of those tried"]

    def summary(self, value: float) -> Mapping[str, Any]:
        """What the run of a value kept; empty: nothing."""
        return read_summary(self.folder(value)) or {}

    def _doubts(self, found: float | None) -> list[str]:
        """Why the value that was found would not hold for longer, if its run ended before that showed."""
        workload = self.config.workload
        if found is None or not self.summary(found) or workload.concurrency is not None or workload.turns > 1:
            return []
        load = offered_load(read_run(self.folder(found)).requests())
        doubt = load and load.sentence()
        return [f"warning: of {self.point(found)}: {doubt}"] if doubt else []

    def _search(self) -> tuple[Bracket, str | None]:
        """The bracket, and why there is none."""
        tries = self.tries()
        try:
            value = next(tries)
            while True:
                point = self.point(value)
                ended = self.runs.measure(point, f"{value:g}", f"run {len(self.ended) + 1}: {point}", keep=True)
                if ended.interrupted or ended.error:
                    return Bracket(), ended.error and f"{point}: {ended.error}"
                self.ended[value] = ended
                holds = ended.metrics[ATTAINMENT] >= self.wanted
                earlier = ", measured before" if ended.is_kept else ""
                print(f"{point}: {self.shares(value)}{earlier}: {'holds' if holds else 'does not'}", flush=True)
                value = tries.send(holds)
        except StopIteration as stop:
            limits: Bracket = stop.value
            return limits, None
        except KeyboardInterrupt:
            self.runs.interrupted = True
            return Bracket(), None

    def _finish(self, limits: Bracket, problem: str | None) -> None:
        pictures, errors = self.runs.directory / SEARCH, list[OutputError]()
        self.console.rule(style="dim")
        if not self.runs.interrupted:
            requests = drawn_requests(self.config.workload)
            value = self.advised(limits)
            words = self.words if value is None else [*self.words, self.point(value)]
            advice = None if problem else advice_line(words, requests)
            first, *rest = [problem] if problem else self.result(limits)
            said = [first, *self._doubts(limits.holds), *rest]
            print("\n".join(filter(None, [*said, advice])))
            if advice:
                with attempt(errors):
                    write_text(pictures / ADVICE, advice)
        with attempt(errors):
            write_csv(pictures / f"{self.files}.csv", self._rows())
        if len(self.ended) > 1:
            with attempt(errors):
                self._draw(pictures / f"{self.files}.png")
            if not errors:
                print(f"picture: {pictures / f'{self.files}.png'}")
            if self.config.repeats == 1:
                print(f"report: kvlab report {self.runs.directory} by={self.range.key}", flush=True)
        best = self.ended[limits.holds].metrics if limits.holds is not None else {}
        metrics = {name: best[name] for name in (ATTAINMENT, GOODPUT) if name in best}
        if limits.holds is not None:
            metrics[self.range.key] = limits.holds
        self.runs.close_parent(errors, pictures, metrics, found=limits.holds is not None)

    def _rows(self) -> Iterator[list[object]]:
        yield [self.range.key, *_COLUMNS]
        for value, ended in sorted(self.ended.items()):
            yield [value, *(ended.metrics.get(name, "") for name in _COLUMNS)]

    def _draw(self, path: Path) -> None:
        from kvlab.lab.figures import mark_simulated, save_figure
        from kvlab.lab.figures.arrival_rate import rate_figure

        records = [read_run(self.folder(value)) for value in self.ended]
        if (figure := rate_figure(records, share=self.wanted, keys=(self.range.key,))) is not None:
            mark_simulated({self.files: figure}, records)
            save_figure(figure, path)
