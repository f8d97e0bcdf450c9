"""python -m src.tune: search the batch, blocks, block size and token budget that are best within a memory.

python -m src.tune optimize=throughput/output_tokens_per_s memory=2GiB
python -m src.tune optimize=latency/e2el_ms_p99 memory=1GiB trials=40 model=qwen3_0_6b workload=mixed32
python -m src.tune optimize=throughput/output_tokens_per_s memory=512MiB kv.block_size=16      leaves one as it is

Any setting of `python -m src.run` may follow. The same command goes on where it was stopped.

  optimize=METRIC  any metric of docs/metrics.md that is better when it is more, or less
  memory=SIZE      for weights, cache and working memory; without it, what this machine has free
  trials=N         configurations to measure in all, those of earlier searches included; 20 unless given
  storage=URL      Optuna's database; an SQLite file in the output folder unless given
  output=DIR       where results go; outputs/tune unless given
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kvlab.cli.commands import run_command
from kvlab.config import parse_bytes
from kvlab.errors import ConfigError, KvlabError, TrackingError

if TYPE_CHECKING:
    from optuna import Study
    from rich.console import Console

    from kvlab.cli.compose import Composition
    from kvlab.lab.tracking import RunStatus, Tracker
    from kvlab.lab.tune.study import Measured


@dataclass
class Question:
    """What the command line asks."""

    optimize: str = ""
    memory: int | None = None
    trials: int = 20
    storage: str | None = None
    output: Path = Path("outputs") / "tune"
    overrides: list[str] = field(default_factory=list)


def read_arguments(arguments: Sequence[str]) -> Question:
    """Take the search's own settings out. Raises ConfigError."""
    question = Question()
    for argument in arguments:
        key, _, value = argument.partition("=")
        if argument.startswith("-"):
            raise ConfigError("option", argument, "unknown; settings are written key=value, and --help lists them")
        if key == "optimize":
            question.optimize = value
        elif key == "memory":
            question.memory = parse_bytes(value, key="memory")
        elif key == "trials":
            if not value.isdecimal() or int(value) < 1:
                raise ConfigError("trials", value, "must be a whole number, at least 1")
            question.trials = int(value)
        elif key == "storage":
            question.storage = value
        elif key == "output":
            question.output = Path(value).expanduser()
        elif key in ("sweep", "resume", "repeat", "hydra.mode"):
            raise ConfigError(key, value, "has no place in a search; it resumes by itself, and makes its own runs")
        elif key == "kv.memory":
            raise ConfigError(
                key, value, "a search chooses the cache's size; give memory=SIZE for all, or kv.num_blocks"
            )
        else:
            question.overrides.append(argument)
    _check_metric(question.optimize)
    return question


def _check_metric(metric: str) -> None:
    from kvlab.lab.catalogue import direction

    if not metric:
        raise ConfigError("optimize", None, "name a metric, such as optimize=throughput/output_tokens_per_s")
    if direction(metric).more_is_better is None:
        raise ConfigError(
            "optimize",
            metric,
            "no such metric, or neither more nor less of it is better; there are throughput/output_tokens_per_s, "
            "latency/ttft_ms_p99, latency/e2el_ms_p50, capacity/peak_running and others in docs/metrics.md",
        )


class Search:
    """A search in progress: its runs, its record, what it says."""

    def __init__(self, question: Question, console: Console) -> None:
        from kvlab.cli.compose import compose_run
        from kvlab.engine.build import resolve_device
        from kvlab.lab.machine import available_memory
        from kvlab.lab.sweep.digest import config_digest, digest_of
        from kvlab.lab.tune.space import SEARCHED, build_space

        self.question, self.console = question, console
        self.base = compose_run(question.overrides)
        config = self.base.config
        if question.memory is None:
            self.memory = available_memory(resolve_device(config.executor.device))
            asked = "free"
        else:
            self.memory = question.memory
            asked = str(question.memory)
        fixed = frozenset(text.partition("=")[0] for text in question.overrides) & set(SEARCHED)
        self.space = build_space(config, self.memory, fixed)
        parts = [question.optimize, asked, config_digest(config, any_repeat=True), *sorted(fixed)]
        self.digest = digest_of("\n".join(parts))
        self.name = (
            f"{question.optimize.replace('/', '-')}-{config.model.name}-{config.workload.name}-{self.digest[:8]}"
        )
        self.directory = question.output / self.name
        self.directory.mkdir(parents=True, exist_ok=True)
        self.tracker: Tracker
        self.interrupted = False

    def run(self) -> int:
        """Search, tell, draw. Returns the exit code."""
        from kvlab.lab.tune.study import best_trial, counted, open_study, search

        question, console = self.question, self.console
        storage = question.storage or f"sqlite:///{question.output.resolve() / 'tune.db'}"
        study = open_study(storage, self.name, question.optimize, question.trials)
        before = len(counted(study))
        self._announce(before)
        self._open_parent(storage)
        started = time.monotonic()
        try:
            for trial in search(study, self.space, question.trials, check=self._check, measure=self._measure):
                self._tell(study, trial, before, time.monotonic() - started)
        except KeyboardInterrupt:
            self.interrupted = True
        done = len(counted(study))
        if done < question.trials and not self.interrupted:
            console.print(f"stopped at {done} of {question.trials} trials: nothing new was found that fits")
        found = best_trial(study)
        self._finish(study)
        if self.interrupted:
            console.print("interrupted: what was tried is kept; the same command goes on from there")
            return 130
        return 0 if found is not None else 1

    def _check(self, values: dict[str, int]) -> None:
        from kvlab.lab.tune.space import check_fits

        check_fits(self._compose(values).config, self.memory)

    def _compose(self, values: dict[str, int]) -> Composition:
        from kvlab.cli.compose import compose_run

        return compose_run([*self.question.overrides, *(f"{key}={value}" for key, value in values.items())])

    def _measure(self, number: int, values: dict[str, int]) -> Measured:
        from kvlab.lab.execute import RunContext, execute
        from kvlab.lab.tune.study import Measured

        point = self._compose(values)
        name = " ".join(f"{key}={value}" for key, value in values.items())
        repeats, found = point.config.repeats, []
        for repeat in range(repeats):
            place = self.directory / str(number) / (str(repeat) if repeats > 1 else "")
            context = RunContext(
                directory=place,
                root=Path(),
                config_yaml=point.yaml,
                choices=point.choices,
                console=self.console,
                name=name,
                in_sweep=True,
                parent_run_id=self.tracker.run_id,
                heading=f"trial {number}: {name}" + (f", repeat {repeat}" if repeats > 1 else ""),
            )
            try:
                result = execute(replace(point.config, repeat=repeat), context)
            except KvlabError as error:
                return Measured(None, str(error))
            if result.status == "interrupted":
                self.interrupted = True
                return Measured(None, interrupted=True)
            if result.status != "finished":
                return Measured(None, result.error or result.status)
            if self.question.optimize not in result.metrics:
                known = ", ".join(sorted(result.metrics))
                raise ConfigError("optimize", self.question.optimize, f"the run does not have it; it has: {known}")
            found.append(result.metrics[self.question.optimize])
        return Measured(median(found))

    def _announce(self, before: int) -> None:
        from kvlab.config import format_bytes

        wanted, space = self.question.trials, self.space
        ranges = [f"{key} {found.low} to {found.high}" for key, found in space.ranges.items()]
        if space.block_sizes:
            ranges.append(f"kv.block_size {', '.join(map(str, space.block_sizes))}")
        text = f"{self.question.optimize} within {format_bytes(self.memory)}: {wanted} trials"
        if before:
            text += f", {before} done before"
        self.console.print(text, highlight=False, soft_wrap=True)
        self.console.print("over " + "; ".join(ranges), highlight=False, soft_wrap=True)

    def _tell(self, study: Study, trial: Any, before: int, passed: float) -> None:
        from kvlab.lab.progress import clock
        from kvlab.lab.tune.study import best_trial, counted

        values = " ".join(f"{key}={value}" for key, value in trial.params.items())
        reason = trial.user_attrs.get("reason") or trial.user_attrs.get("error")
        if trial.state.name == "PRUNED":
            line = f"trial {trial.number} left out: {values}: {reason}"
            self.console.print(line, highlight=False, soft_wrap=True, style="dim", markup=False)
            return
        done, wanted = len(counted(study)), self.question.trials
        value = f"{trial.value:,.4g}" if trial.value is not None else reason or "interrupted"
        line = f"{done} of {wanted} trials: {value}"
        best = best_trial(study)
        if best is not None:
            line += f", best so far {self.question.optimize} = {best.value:,.4g} (trial {best.number})"
        if done > before and done < wanted:
            line += f", about {clock(passed / (done - before) * (wanted - done))} left"
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _open_parent(self, storage: str) -> None:
        from kvlab.lab.settings import without_password
        from kvlab.lab.sweep.history import open_history
        from kvlab.lab.tracking import NullTracker

        self.tracker = NullTracker()
        params = {
            "tune.optimize": self.question.optimize,
            "tune.memory": self.memory,
            "tune.storage": without_password(storage),
            "tune.study": self.name,
        }
        try:
            history = open_history(self.base.config.tracking)
            if history is None:
                return
            parent = history.parent("tune", self.digest)
            if parent is not None:
                history.close_open_runs(parent, exclusive=False)  # several processes may share a search
            self.tracker = history.open_parent("tune", self.digest, parent, name=self.name, params=params)
        except TrackingError as error:
            print(f"warning: {error}", file=sys.stderr)

    def _finish(self, study: Study) -> None:
        from kvlab.lab.sweep.history import close_parent
        from kvlab.lab.tracking import RunStatus
        from kvlab.lab.tune.pictures import draw_search, write_page, write_trials
        from kvlab.lab.tune.study import best_trial

        best, pictures = best_trial(study), self.directory / "search"
        pictures.mkdir(exist_ok=True)
        write_trials(study, pictures / "trials.csv")
        status: RunStatus = RunStatus.INTERRUPTED if self.interrupted else RunStatus.FINISHED
        if best is None:
            status = RunStatus.INTERRUPTED if self.interrupted else RunStatus.FAILED
            self.console.print("no trial has a value; why is in " + str(pictures / "trials.csv"))
        else:
            chosen = [f"{key}={value}" for key, value in best.params.items()]
            command = " ".join(["python -m src.run", *map(_quoted, self.question.overrides), *chosen])
            draw_search(study, self.question.optimize).savefig(pictures / "tune.png")
            write_page(study, self.question.optimize, command, pictures / "tune.html")
            self.console.rule(style="dim")
            first = study.trials[0]
            gain = ""
            if first.value and best.number != first.number:
                gain = f", {best.value / first.value:.2f} times that of the settings it began with"
            text = f"best: {self.question.optimize} = {best.value:,.4g} (trial {best.number}){gain}"
            self.console.print(text, highlight=False, soft_wrap=True)
            self.console.print(command, highlight=False, soft_wrap=True, markup=False)
            self.console.print(f"pictures: {pictures / 'tune.html'}  {pictures / 'tune.png'}", highlight=False,
                               soft_wrap=True)  # fmt: skip
        close_parent(self.tracker, status, pictures, {self.question.optimize: best.value} if best else {})


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)


def answer(arguments: list[str]) -> int:
    """Read the command line and search. Returns the exit code. Raises a KvlabError."""
    question = read_arguments(arguments)
    from rich.console import Console

    return Search(question, Console()).run()


def main() -> None:
    """Run the command line."""
    run_command(__doc__, answer)


if __name__ == "__main__":
    main()
