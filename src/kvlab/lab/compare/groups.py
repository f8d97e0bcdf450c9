"""Which runs are repeats of each other, and in which settings the groups differ."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvlab.errors import ConfigError
from kvlab.lab.results.records import RunRecord
from kvlab.lab.settings import measured

SET = "set"  # a key of its own for `by`: the argument that a run came with
_LONGEST = 200  # characters of a name; behind them a run is its directory


class RunSet(NamedTuple):
    """The runs of one argument: a sweep, a folder, a filter, one run or several joined by commas."""

    name: str
    runs: tuple[RunRecord, ...]


class Group(NamedTuple):
    """Runs that are repeats of each other. `runs` finished; `left_out` did not, and are compared in nothing.

    `turns` has the run of each turn of a sweep. Runs of two groups in the same turn were made to be compared: they
    are the same repeat of the same sweep, and alike in all that their groups do not say. `mixed` are keys in which
    its own runs differ, which `by` left aside.
    """

    name: str
    runs: list[RunRecord]
    left_out: list[RunRecord]
    turns: dict[tuple[object, ...], RunRecord]  # empty where the group has no order to pair by
    mixed: list[str]

    @property
    def example(self) -> RunRecord:
        """A run that stands for the group: the first that finished, else the first."""
        return [*self.runs, *self.left_out][0]

    @property
    def endings(self) -> str:
        """How the runs ended that did not finish."""
        return ", ".join(sorted({run.status.replace("_", " ") for run in self.left_out}))

    def values(self, metric: str) -> list[float]:
        """The metric in each run that has it."""
        return [run.metrics[metric] for run in self.runs if metric in run.metrics]


def pairs_of(baseline: Group, other: Group) -> list[tuple[RunRecord, RunRecord]]:
    """Runs of both that were made in turn; none unless every run of the smaller group has its partner."""
    pairs = [(baseline.turns[turn], run) for turn, run in other.turns.items() if turn in baseline.turns]
    return pairs if len(pairs) >= 2 and len(pairs) == min(len(baseline.runs), len(other.runs)) else []


def settings(run: RunRecord) -> dict[str, object]:
    """The flat configuration less what changes nothing of what the run does. Where the environment is part of it,
    whose values are not recorded, a digest tells them apart; plugins of one name are told apart by their code.
    """
    kept = measured(run.config, any_repeat=True)
    hidden = any("${" in value for value in kept.values() if isinstance(value, str))
    kept |= {f"plugins.{name}": code for name, code in dict(run.facts.get("plugins") or {}).items()}
    return kept | ({"environment": run.facts.get("settings_digest")} if hidden else {})


def differing(configs: Sequence[Mapping[str, object]]) -> list[str]:
    """The keys that are not the same in all of them, in the order in which they come."""
    keys = list(dict.fromkeys(key for config in configs for key in config))
    return [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]


def short_keys(runs: Sequence[RunRecord], keys: Sequence[str], deciding: Collection[str] = ()) -> list[str]:
    """The keys as one would give them on the command line: a group's choice stands for what it alone decides, and
    those of the `deciding` groups also for settings of other groups that go with it, as a server's limits with its
    device.
    """
    chosen = [group for group in runs[0].choices if len({run.choices.get(group) for run in runs}) > 1]

    def decided(key: str) -> bool:
        for group in {key.split(".")[0], *deciding}.intersection(chosen):
            both = {(run.choices.get(group), repr(run.config.get(key))) for run in runs}
            if len(both) == len({choice for choice, _ in both}):
                return True
        return False

    return [*chosen, *(key for key in keys if not decided(key))]


def value_of(run: RunRecord, key: str) -> object:
    """The run's value for a configuration key, a tag (`tags.x`) or a group whose choice is meant (`kv`)."""
    if key in run.choices:
        return run.choices[key]
    value = run.config[key] if key in run.config else settings(run).get(key, "-")
    return run.tags.get(key.removeprefix("tags."), value) if key.startswith("tags.") else value


def group_runs(sets: Sequence[RunSet], by: Sequence[str] = ()) -> list[Group]:
    """Sort runs into groups, in the order in which they come.

    With `by`, runs that agree in those keys are a group (`set`: in the argument they came with). Without, it is
    runs of the same configuration; where several arguments have the very same configurations, the arguments are
    compared.
    """
    runs = [run for chosen in sets for run in chosen.runs]
    _check_keys(runs, by)
    by = tuple(by) or _default_by(sets)
    varied = differing([settings(run) for run in runs])
    named = by or tuple(short_keys(runs, varied))
    by_argument = named == (SET,) or (not named and len(sets) == 1)
    groups: dict[tuple[object, ...], tuple[str, list[RunRecord]]] = {}
    for chosen in sets:
        for run in chosen.runs:
            values = {key: chosen.name if key == SET else value_of(run, key) for key in named}
            name = " ".join(f"{key}={'null' if value is None else value}" for key, value in values.items())
            name = str(run.directory) if len(name) > _LONGEST else name
            name = chosen.name if by_argument else name or run.name
            key = tuple(map(repr, values.values() if by else (settings(run).get(setting) for setting in varied)))
            groups.setdefault(key, (name, []))[1].append(run)
    return [_group(name, members, by, varied) for name, members in groups.values()]


def _default_by(sets: Sequence[RunSet]) -> tuple[str, ...]:
    """By argument, where there are several and each has the same configurations; else by configuration."""
    contents = {frozenset(repr(sorted(settings(run).items())) for run in chosen.runs) for chosen in sets}
    several = any(len(chosen.runs) > 1 for chosen in sets) or len(sets) == 2
    return (SET,) if len(sets) > 1 and len(contents) == 1 and several else ()


def _group(name: str, runs: Sequence[RunRecord], by: Sequence[str], varied: Sequence[str]) -> Group:
    finished = [run for run in runs if run.finished]
    left_out, mixed = [run for run in runs if not run.finished], differing([settings(run) for run in runs])
    if mixed:
        finished = _told_once(finished)
    rest = [key for key in varied if key not in by and key.split(".")[0] not in by] if by else []
    turns = {_turn(run, rest, any_sweep=SET in by and bool(rest)): run for run in finished}
    distinct = len(turns) == len(finished)  # two runs of a group cannot be the same repeat
    return Group(name, finished, left_out, turns if distinct else {}, mixed)


def repeated(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Simulated runs that repeat an earlier one of these, to the last digit."""
    seen, again = set[str](), list[RunRecord]()
    for run in runs:
        key = repr((sorted(settings(run).items()), sorted(run.metrics.items())))
        if run.simulated and key in seen:
            again.append(run)
        seen.add(key)
    return again


def _told_once(runs: list[RunRecord]) -> list[RunRecord]:
    """Among others, as many points as were simulated: an interval over copies of them is too short."""
    again = {id(run) for run in repeated(runs)}
    return [run for run in runs if id(run) not in again]


def _turn(run: RunRecord, rest: Sequence[str], *, any_sweep: bool) -> tuple[object, ...]:
    """What a run has in common with those it was made in turn with."""
    sweep = run.tags.get("mlflow.parentRunId") or str(run.directory.resolve().parent)
    return ("" if any_sweep else sweep, run.config.get("repeat", 0), *(repr(run.config.get(key)) for key in rest))


def _check_keys(runs: Sequence[RunRecord], by: Sequence[str]) -> None:
    known = {SET} | {
        key for run in runs for key in (*run.config, *run.choices, *(f"tags.{tag}" for tag in run.tags))
    }
    for key in by:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.4)
            raise ConfigError("by", key, f"no run has this key{'; near it: ' + ', '.join(near) if near else ''}")
