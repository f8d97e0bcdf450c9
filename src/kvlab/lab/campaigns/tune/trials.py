"""The runs of a search: composed, executed one after another, kept as children of one run in the tracking store."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from kvlab.config import RunConfig
from kvlab.errors import OutputError, TrackingError
from kvlab.lab.campaigns.sweep.history import close_parent, open_history
from kvlab.lab.files import check_directory, sentences
from kvlab.lab.results.provenance import config_digest, digest_of, other_versions
from kvlab.lab.results.records import read_summary
from kvlab.lab.run.execute import RunContext, execute
from kvlab.lab.settings import Composition
from kvlab.lab.terminal import Terminal, warn
from kvlab.lab.tracking import RunStatus, Tracker
from kvlab.plugins import reason_of
from kvlab.secrets import redact

Compose = Callable[[Sequence[str]], Composition]  # of words of a command line


@dataclass(frozen=True, slots=True)
class Ended:
    """How the runs of one point ended: the medians of their metrics, or why there are none."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    interrupted: bool = False
    is_kept: bool = False  # of an earlier search


class Trials:
    """Runs of `config` with other settings besides `overrides`, in folders of `directory`. That is in `output`, by
    the `name` of the search: its `aim`, and a digest of the `parts` that tell it from others. `unwritten` has what
    could not be written, `interrupted` says that a run was.
    """

    def __init__(
        self,
        aim: str,
        parts: Sequence[str],
        config: RunConfig,
        overrides: Sequence[str],
        output: str,
        compose: Compose,
        console: Terminal,
    ) -> None:
        self._digest = digest_of("\n".join(parts))
        named = redact(f"{config.model.name}-{config.workload.name}")
        self.name = f"{aim}-{named}-{self._digest[:8]}"
        self.directory = Path(output).expanduser() / self.name
        check_directory("output", self.directory)
        self.overrides, self.console = overrides, console
        self._config, self._compose = config, compose
        self.interrupted = False
        self.unwritten: list[object] = []
        self._tracker = Tracker()
        self.said: set[str] = set()  # what no run needs to say

    def compose(self, point: str) -> Composition:
        """The run with the settings of `point` too, which are words of a command line. Raises a KvlabError."""
        return self._compose([*self.overrides, *point.split()])

    def measure(self, point: str, folder: str, heading: str, *, keep: bool = False) -> Ended:
        """Run `point` as often as `repeats` says; with `keep`, but for those whose results `directory` has."""
        composed = self.compose(point)
        repeats, metrics, kept = composed.config.repeats, list[Mapping[str, float]](), 0
        for repeat in range(repeats):
            directory = self.directory / folder / (str(repeat) if repeats > 1 else "")
            config = replace(composed.config, repeat=repeat)
            if keep and (known := _known(directory, config)) is not None:
                metrics, kept = [*metrics, known["metrics"]], kept + 1
                self.say_versions([known])
                continue
            title = heading + (f", repeat {repeat}" if repeats > 1 else "")
            parent = self._tracker.run_id
            context = RunContext(
                replace(composed, config=config),
                directory,
                self.console,
                point,
                in_sweep=True,
                parent_run_id=parent,
                heading=title,
                said=self.said,
            )
            try:
                result = execute(context)
            except Exception as error:  # of this point alone, as in a sweep
                return Ended(error=redact(reason_of(error)))
            self.unwritten += result.unwritten
            if result.status == "interrupted":
                self.interrupted = True
                return Ended(interrupted=True)
            if result.status != "finished":
                return Ended(error=redact(result.error or result.status))
            metrics.append(result.metrics)
        common = set.intersection(*map(set, metrics))
        return Ended({name: median(run[name] for run in metrics) for name in common}, is_kept=kept == repeats)

    def say_versions(self, kept: Iterable[Mapping[str, Any]]) -> None:
        """Warn once where other versions of kvlab made results that are kept, whose summaries these are."""
        found = set(other_versions(summary.get("environment", {}) for summary in kept)) - self.said
        warn(*found)
        self.said |= found

    def first(self, folder: str) -> Path:
        """Where the results of a point's first run are."""
        return self.directory / folder / ("0" if self._config.repeats > 1 else "")

    def open_parent(self, params: Mapping[str, object]) -> None:
        """Open the parent run, or go on with that of an earlier search; without a store that works, warn."""
        try:
            history = open_history(self._config.tracking)
            if history is None:
                return
            parent = history.parent("tune", self._digest)
            if parent is not None:
                history.close_open_runs(parent, exclusive=False)  # several processes may share a search
            named = {**params, "tune.study": self.name}
            self._tracker = history.open_parent("tune", self._digest, parent, name=self.name, params=named)
        except TrackingError as error:
            warn(error)

    def exit_code(self, *, found: bool) -> int:
        """How the search ends, whose answer was `found` or not."""
        if self.interrupted:
            print("interrupted: what was tried is kept; the same command goes on from there")
            return 130
        return 0 if found and not self.unwritten else 1

    def close_parent(
        self, errors: Sequence[OutputError], pictures: Path, metrics: Mapping[str, float], *, found: bool
    ) -> None:
        """Warn of `errors`, which are files that could not be written, and close the parent run."""
        warn(*sentences(errors))
        self.unwritten += errors
        ended = RunStatus.FINISHED if found else RunStatus.FAILED
        status = RunStatus.INTERRUPTED if self.interrupted else ended
        close_parent(self._tracker, status, pictures, dict(metrics))


def _known(directory: Path, config: RunConfig) -> Mapping[str, Any] | None:
    """The summary of the finished run of this very configuration in a directory."""
    summary = read_summary(directory) or {}
    if summary.get("status") != "finished" or summary.get("config_digest") != config_digest(config):
        return None
    return summary
