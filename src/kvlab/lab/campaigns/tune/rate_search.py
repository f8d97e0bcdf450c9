"""A search for the largest arrival rate: what `kvlab tune find=rate` runs, prints and keeps."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.errors import OutputError
from kvlab.lab.campaigns.sweep.digest import config_digest, digest_of
from kvlab.lab.campaigns.tune.rate import Bracket, bracket, rate_range
from kvlab.lab.campaigns.tune.settings import TuneSettings
from kvlab.lab.campaigns.tune.trials import Compose, Ended, Trials
from kvlab.lab.files import attempt, replacing
from kvlab.lab.results.catalogue import metric
from kvlab.lab.results.records import read_run, read_summary
from kvlab.lab.results.tables import count
from kvlab.lab.run.plan import plan_peer, plan_run
from kvlab.secrets import redact, redacted_setting

if TYPE_CHECKING:
    from kvlab.lab.terminal import Terminal

ATTAINMENT, GOODPUT = "slo/attainment", "slo/goodput_per_s"
_COLUMNS = (
    ATTAINMENT,
    "slo/ttft_attainment",
    "slo/tpot_attainment",
    GOODPUT,
    "latency/ttft_ms_p99",
    "latency/tpot_ms_p99",
)


class RateSearch:
    """Finds the largest rate that keeps `attainment` percent of the requests within their limits."""

    def __init__(
        self, settings: TuneSettings, overrides: Sequence[str], compose: Compose, console: Terminal
    ) -> None:
        self.wanted, self.precision, self.console = settings.attainment, settings.precision, console
        base = compose(overrides)
        self.base, config = base, base.config
        self.range = rate_range(config, settings.rates)
        _ = plan_peer(config) or plan_run(config)  # what cannot run is refused before the search is recorded
        others = [text for text in overrides if text.partition("=")[0].lstrip("+") != self.range.key]
        self.words = others
        self.digest = digest_of("\n".join(["rate", config_digest(config, any_repeat=True), settings.rates or ""]))
        named = redact(f"{config.model.name}-{config.workload.name}")
        self.name = f"rate-{named}-{self.digest[:8]}"
        self.runs = Trials(others, Path(settings.output).expanduser() / self.name, compose, console)
        self.ended: dict[float, Ended] = {}

    def run(self) -> int:
        """Search, report, draw. Returns the exit code."""
        limits = " and ".join(f"{name} {most:g} ms" for name, most in self.base.config.slo.limits.items())
        span = f"from {self.range.low:g} to {self.range.high:g}, beginning at {self.range.start:g}"
        print(f"the largest {self.range.key} that keeps {self.wanted:g} % of requests within {limits}")
        print(f"{span}, to {self.precision:g} %", flush=True)
        params = {"tune.find": "rate", "tune.attainment": self.wanted, "tune.study": self.name}
        self.runs.open_parent(self.base.config, self.digest, self.name, params)
        found, problem = self._search()
        self._finish(found, problem)
        if self.runs.interrupted:
            print("interrupted: what was tried is kept; the same command goes on from there")
            return 130
        return 0 if found.holds is not None and found.fails is not None and not self.runs.unwritten else 1

    def _search(self) -> tuple[Bracket, str | None]:
        """The bracket, and why there is none."""
        tries = bracket(self.range, self.precision)
        try:
            rate = next(tries)
            while True:
                point = self._point(rate)
                ended = self.runs.measure(point, f"{rate:g}", f"run {len(self.ended) + 1}: {point}", keep=True)
                if ended.interrupted or ended.error:
                    return Bracket(), ended.error and f"{point}: {ended.error}"
                self.ended[rate] = ended
                holds = ended.metrics[ATTAINMENT] >= self.wanted
                earlier = ", measured before" if ended.is_kept else ""
                print(f"{point}: {self._shares(rate)}{earlier}: {'holds' if holds else 'does not'}", flush=True)
                rate = tries.send(holds)
        except StopIteration as stop:
            found: Bracket = stop.value
            return found, None
        except KeyboardInterrupt:
            self.runs.interrupted = True
            return Bracket(), None

    def _finish(self, found: Bracket, problem: str | None) -> None:
        pictures, errors = self.runs.directory / "search", list[OutputError]()
        self.console.rule(style="dim")
        if not self.runs.interrupted:
            print(problem or "\n".join(self._result(found)))
        with attempt(errors):
            self._write(pictures / "rates.csv")
        if len(self.ended) > 1:
            with attempt(errors):
                self._draw(pictures / "rates.png")
            if not errors:
                print(f"picture: {pictures / 'rates.png'}")
            if self.base.config.repeats == 1:
                print(f"report: kvlab report {self.runs.directory}", flush=True)
        best = self.ended[found.holds].metrics if found.holds is not None else {}
        metrics = {name: best[name] for name in (ATTAINMENT, GOODPUT) if name in best}
        if found.holds is not None:
            metrics[self.range.key] = found.holds
        self.runs.close_parent(errors, pictures, metrics, found=found.holds is not None)

    def _result(self, found: Bracket) -> list[str]:
        """What came of it, in sentences."""
        if found.holds is None:
            least = min(self.ended)
            has = f"even {self._point(least)}, the lowest rate tried, has {self._shares(least)}"
            return [f"no rate holds: {has}; take wider limits, or try lower ones (rates=LOW-HIGH)"]
        holds = f"{self._point(found.holds)}{self._per_second(found.holds)}"
        if found.fails is None:
            has = f"even {holds}, the highest rate tried, has {self._shares(found.holds)}"
            return [f"every rate holds: {has}; take more requests, or try higher ones (rates=LOW-HIGH)"]
        words = [shlex.quote(redacted_setting(text)) for text in self.words]
        return [
            f"largest: {holds}: {self._shares(found.holds)}; found in {count(len(self.ended), 'run')}",
            f"above it: {self._point(found.fails)}: {self._shares(found.fails)}",
            " ".join(["kvlab run", *words, self._point(found.holds)]),
        ]

    def _shares(self, rate: float) -> str:
        """Attainment, that of each limit where there are two, and goodput."""
        metrics = self.ended[rate].metrics
        alone = {name: metrics.get(f"slo/{name}_attainment") for name in ("ttft", "tpot")}
        both = [f"{name} {share:.1f} %" for name, share in alone.items() if share is not None]
        within = f"{metrics[ATTAINMENT]:.1f} % within" + (f" ({', '.join(both)})" if len(both) > 1 else "")
        return f"{within}, goodput {metric(GOODPUT).text(metrics.get(GOODPUT))}"

    def _point(self, rate: float) -> str:
        return f"{self.range.key}={rate:g}"

    def _per_second(self, rate: float) -> str:
        """Of a trace: how many requests arrive per second at this scale."""
        if self.range.key == "workload.rate":
            return ""
        profile = (read_summary(self._folder(rate)) or {}).get("workload") or {}
        last = profile.get("last_arrival_s")
        return f" ({profile['num_rows'] / last:.3g} requests per second)" if last else ""

    def _folder(self, rate: float) -> Path:
        """Where the results of a rate are; of several repeats those of the first."""
        folder = self.runs.directory / f"{rate:g}"
        return folder / "0" if self.base.config.repeats > 1 else folder

    def _write(self, path: Path) -> None:
        with replacing(path) as own, own.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([self.range.key, *_COLUMNS])
            for rate, ended in sorted(self.ended.items()):
                writer.writerow([rate, *(ended.metrics.get(name, "") for name in _COLUMNS)])

    def _draw(self, path: Path) -> None:
        from kvlab.lab.figures import mark_simulated
        from kvlab.lab.figures.arrival_rate import rate_figure

        records = [read_run(self._folder(rate)) for rate in self.ended]
        if (figure := rate_figure(records, share=self.wanted)) is not None:
            mark_simulated({"rates": figure}, records)
            with replacing(path) as own:
                figure.savefig(own)
