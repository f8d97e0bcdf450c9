"""A search in progress: what `kvlab tune` composes, runs, prints and keeps."""

import time
from collections.abc import Mapping, Sequence

from optuna import Study
from optuna.trial import FrozenTrial

from kvlab.config import format_bytes, parse_bytes
from kvlab.errors import ConfigError, OutputError
from kvlab.lab.advice_line import advice_line, drawn_requests
from kvlab.lab.campaigns.tune.pictures import draw_search, trial_rows, write_page
from kvlab.lab.campaigns.tune.settings import TuneSettings
from kvlab.lab.campaigns.tune.space import SEARCHED, build_space, check_fits
from kvlab.lab.campaigns.tune.study import STORAGE_ERRORS, best_trial, counted, open_study, search, storage_reason
from kvlab.lab.campaigns.tune.trials import Compose, Ended, Trials
from kvlab.lab.capacity import plan_capacity
from kvlab.lab.files import attempt, replacing, write_csv, write_text
from kvlab.lab.machine import available_memory
from kvlab.lab.results.metrics import GOODPUT
from kvlab.lab.results.provenance import config_digest
from kvlab.lab.results.records import read_summary
from kvlab.lab.results.sureness import how_far_off
from kvlab.lab.run.progress import clock
from kvlab.lab.settings import run_command
from kvlab.lab.terminal import Terminal, warn
from kvlab.planning.settings import resolve_device
from kvlab.run_files import ADVICE, SEARCH
from kvlab.secrets import redact


class Search:
    """A search: its space, its study, its parent run. `overrides` are the settings of all its runs."""

    def __init__(
        self, settings: TuneSettings, overrides: Sequence[str], compose: Compose, console: Terminal
    ) -> None:
        self.overrides, self.console, self.trials = overrides, console, settings.trials
        self.config = config = compose(overrides).config
        self.metric = settings.optimize or GOODPUT  # with limits alone
        config.slo.check_optimize(self.metric)
        asked = "free" if settings.memory is None else str(parse_bytes(settings.memory, key="memory"))
        self.memory = self._available(settings.memory)
        fixed = frozenset(text.partition("=")[0] for text in overrides) & set(SEARCHED)
        self.space = build_space(config, self.memory, fixed)
        parts = [self.metric, asked, config_digest(config, any_repeat=True), *sorted(fixed)]
        aim = self.metric.replace("/", "-")
        self.runs = Trials(aim, parts, config, overrides, settings.output, compose, console)
        self.storage = settings.storage or f"sqlite:///{self.runs.directory.parent.resolve() / 'tune.db'}"

    def _available(self, asked: str | None) -> int:
        """Bytes for weights, cache and working memory. Raises ConfigError for hardware, which has its own."""
        config = self.config
        if config.hardware is None:
            device = resolve_device(config.executor.device)
            return parse_bytes(asked, key="memory") if asked else available_memory(device)
        config.hardware.refuse_memory(asked)
        return plan_capacity(config, device="cuda").memory or 0

    def run(self) -> int:
        """Search, report, draw. Returns the exit code."""
        study = open_study(self.storage, self.runs.name, self.metric, self.trials)
        before = len(counted(study))
        ranges = [f"{key} {bounds.low} to {bounds.high}" for key, bounds in self.space.ranges.items()]
        if self.space.block_sizes:
            ranges.append(f"kv.block_size {', '.join(map(str, self.space.block_sizes))}")
        earlier = f", {before} done before" if before else ""
        print(f"{self.metric} within {format_bytes(self.memory)}: {self.trials} trials{earlier}")
        print("over " + "; ".join(ranges), flush=True)
        folders = (self.runs.first(str(trial.number)) for trial in counted(study))
        self.runs.say_versions(read_summary(folder) or {} for folder in folders)
        params = {"tune.optimize": self.metric, "tune.memory": self.memory, "tune.storage": redact(self.storage)}
        self.runs.open_parent(params)
        study = self._search(study, before, time.monotonic())
        done = len(counted(study))
        if done < self.trials and not self.runs.interrupted:
            print(f"stopped at {done} of {self.trials} trials: nothing new was found that fits")
        self._finish(study)
        return self.runs.exit_code(found=best_trial(study) is not None)

    def _search(self, study: Study, before: int, started: float) -> Study:
        """Search. Returns the study, in memory where its database failed."""
        ended = [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
        try:
            trials = search(
                study, self.space, self.metric, self.trials, check=self._check, measure=self._measure, ended=ended
            )
            for trial in trials:
                self._report(study, trial, before, time.monotonic() - started)
        except KeyboardInterrupt:
            self.runs.interrupted = True
        except STORAGE_ERRORS as error:
            reason = storage_reason(error, self.storage)
            text = f"storage={redact(self.storage)}: {reason}; the search goes on without it"
            warn(text)
            self.runs.unwritten.append(text)
            kept = open_study(None, self.runs.name, self.metric, self.trials, ended)
            return self._search(kept, before, started)
        return study

    def _check(self, values: dict[str, int]) -> None:
        check_fits(self.runs.compose(_overrides(values)).config, self.memory)

    def _measure(self, number: int, values: dict[str, int]) -> Ended:
        point = _overrides(values)
        ended = self.runs.measure(point, str(number), f"trial {number}: {point}")
        if not ended.error and not ended.interrupted and self.metric not in ended.metrics:
            known = ", ".join(sorted(ended.metrics))
            raise ConfigError("optimize", self.metric, f"the run does not have it; it has: {known}")
        return ended

    def _report(self, study: Study, trial: FrozenTrial, before: int, passed: float) -> None:
        reason = trial.user_attrs.get("reason") or trial.user_attrs.get("error")
        if trial.state.name == "PRUNED":
            print(f"trial {trial.number} left out: {_overrides(trial.params)}: {reason}", flush=True)
            return
        done, wanted = len(counted(study)), self.trials
        value = f"{trial.value:,.4g}" if trial.value is not None else reason or "interrupted"
        line = f"{done} of {wanted} trials: {value}"
        if best := best_trial(study):
            line += f", best so far {self._value(best)}"
        if before < done < wanted:
            line += f", about {clock(passed / (done - before) * (wanted - done))} left"
        print(line, flush=True)

    def _value(self, trial: FrozenTrial) -> str:
        return f"{self.metric} = {trial.value:,.4g} (trial {trial.number})"

    def _finish(self, study: Study) -> None:
        best, pictures = best_trial(study), self.runs.directory / SEARCH
        errors: list[OutputError] = []
        with attempt(errors):
            write_csv(pictures / "trials.csv", trial_rows(study))
        if best is None:
            print(f"no trial has a value; why is in {pictures / 'trials.csv'}")
        else:
            words = [*self.overrides, *_overrides(best.params).split()]
            command = run_command(words)
            with attempt(errors), replacing(pictures / "tune.png") as own:
                draw_search(study, self.metric).savefig(own)
            first, gain = study.trials[0], ""
            if first.value and best.number != first.number:
                gain = f", {best.value / first.value:.2f} times that of the settings it began with"
            kept = read_summary(self.runs.first(str(best.number))) or {}
            far = how_far_off([kept], compared=bool(gain))
            with attempt(errors):
                write_page(study, self.metric, command, far, pictures / "tune.html")
            self.console.rule(style="dim")
            advice = advice_line(words, drawn_requests(self.config.workload))
            print("\n".join(filter(None, [f"best: {self._value(best)}{gain}", far, command, advice])))
            if advice:
                with attempt(errors):
                    write_text(pictures / ADVICE, advice)
            if not errors:
                print(f"pictures: {pictures / 'tune.html'}  {pictures / 'tune.png'}", flush=True)
        metrics = {self.metric: best.value} if best and best.value is not None else {}
        self.runs.close_parent(errors, pictures, metrics, found=best is not None)


def _overrides(values: Mapping[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())
