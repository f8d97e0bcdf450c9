"""From groups of runs to a report."""

from collections.abc import Sequence
from statistics import median

from kvlab.errors import ConfigError, RecordError
from kvlab.lab.compare.gate import check
from kvlab.lab.compare.groups import Group, RunSet, differing, group_runs, pairs_of, settings, short_keys, value_of
from kvlab.lab.compare.interval import SAME, Estimate, estimate, is_worse, verdict
from kvlab.lab.compare.work import check_groups, obstacle
from kvlab.lab.report import rows
from kvlab.lab.report.model import Cell, Report, Row
from kvlab.lab.report.notes import listed, method_notes, warnings
from kvlab.lab.report.options import ReportOptions
from kvlab.lab.results.answers import sample_answers
from kvlab.lab.results.catalogue import metric as entry_of

_NARROW = 0.05  # an interval within this says `same` without a reservation
_MOST_HEADLINES = 6


def build_report(sets: Sequence[RunSet], options: ReportOptions) -> Report:
    """Compare the groups of these runs with the baseline.

    Raises RecordError where nothing can be compared, ConfigError for a metric or a baseline that is not there.
    """
    groups = _baseline_first(group_runs(sets, options.by), options.baseline)
    baseline, others = groups[0], groups[1:]
    for condition in options.conditions:
        found = rows.find_metrics("fail_if", condition.metric, groups)
        if found != [condition.metric]:  # a pattern, which `metrics` takes
            raise ConfigError("fail_if", condition.metric, f"is of one metric; name one of {', '.join(found)}")
    obstacles = {group.name: reason for group in others if (reason := obstacle(baseline, group, options.by))}
    refused = {} if options.force else obstacles
    _refuse_if_nothing_is_left(baseline, others, refused)
    metrics = rows.choose_metrics(groups, options.metrics)
    comparison = _Comparison(groups, options, refused)
    return Report(
        title=_title(sets, groups),
        groups=groups,
        differences=_differences(groups),
        headlines=comparison.headlines(rows.primary_metric(groups, metrics if options.metrics else ())),
        rows=[comparison.row(metric) for metric in metrics],
        outputs=_outputs(baseline, others),
        method=method_notes(groups, options),
        warnings=warnings(groups, obstacles, options),
        answers=[
            (group.name, answers) for group in groups if (answers := sample_answers(group.example.requests()))
        ],
        findings=[
            check(condition, baseline, group, comparison.find(condition.metric, group), refused.get(group.name))
            for condition in options.conditions
            for group in others or groups
        ],
    )


class _Comparison:
    """Groups against the first of them."""

    def __init__(self, groups: Sequence[Group], options: ReportOptions, refused: dict[str, str]) -> None:
        self._groups, self._baseline, self._options, self._refused = groups, groups[0], options, refused

    def find(self, metric: str, group: Group) -> Estimate | None:
        """How a group differs in a metric; None where either has no value."""
        before, after = self._baseline.values(metric), group.values(metric)
        if not before or not after or group is self._baseline:
            return None
        both = [(first.metrics, second.metrics) for first, second in pairs_of(self._baseline, group)]
        pairs = [(first[metric], second[metric]) for first, second in both if metric in first and metric in second]
        return estimate(before, after, pairs=pairs, confidence=self._options.confidence)

    def word(self, metric: str, group: Group, change: Estimate) -> str | None:
        """The verdict; None where there is no interval or the work was not the same."""
        return None if group.name in self._refused else verdict(metric, change, self._options.min_effect / 100)

    def row(self, metric: str) -> Row:
        """A metric in all groups."""
        entry = entry_of(metric)
        cells = []
        for group in self._groups:
            values = tuple(group.values(metric))
            cell = Cell(rows.value_text(entry, median(values)) if values else "-", dots=values)
            if (change := self.find(metric, group)) is not None:
                word, tone = self.word(metric, group, change) or "", "plain"
                if word not in ("", SAME) and entry.direction.more_is_better is not None:
                    tone = "bad" if is_worse(metric, word) else "good"
                delta, interval = rows.delta_text(change, entry), rows.interval_text(change)
                cell = cell._replace(delta=delta, interval=interval, word=word, tone=tone)
            cells.append(cell)
        return Row(entry.section, entry.label, metric, tuple(cells))

    def headlines(self, metric: str) -> list[str]:
        """A sentence for each group; of many the one with the least and the one with the most of the metric."""
        others = self._groups[1:]
        if len(others) > _MOST_HEADLINES:
            known = sorted((g for g in others if g.values(metric)), key=lambda group: median(group.values(metric)))
            others = [known[0], known[-1]] if len(known) > 1 else known
        return [self.headline(group, metric) for group in others]

    def headline(self, group: Group, metric: str) -> str:
        """How a group compares with the baseline in one metric, in a sentence."""
        entry, name = entry_of(metric), self._baseline.name
        change = self.find(metric, group)
        if change is None:
            why = f"no {metric}" if group.runs else f"none of its runs finished ({group.endings})"
            return f"{group.name}: {why}."
        word = self.word(metric, group, change)
        before, after = (rows.value_text(entry, median(g.values(metric))) for g in (self._baseline, group))
        figures = f"{entry.alone or entry.label} {after} against {before}, {rows.delta_text(change, entry)}"
        if word is None:
            reason = self._refused.get(group.name) or "one run each, so that there is no interval and no verdict"
            return f"{group.name} against {name}: {figures}; {reason}."
        interval = rows.interval_text(change)
        wide = interval if interval == "exact" else f"{self._options.confidence:g} % interval {interval}"
        runs = f"{change.runs[0]} pairs" if change.paired else f"{change.runs[0]} and {change.runs[1]} runs"
        what = f"the same as {name}{_reservation(change)}" if word == SAME else f"{word} than {name}"
        return f"{group.name} is {what}: {figures} ({wide}, {runs})."


def _reservation(change: Estimate) -> str:
    """What a verdict of `same` leaves open."""
    widest = max(abs(change.low or 0.0), abs(change.high or 0.0))
    if widest < _NARROW:
        return ""
    return f" as far as these repeats show (up to {100 * widest:.0f} % may hide; more repeats would show it)"


def _outputs(baseline: Group, others: Sequence[Group]) -> list[tuple[str, str]]:
    """Whether outputs are those of the baseline, and the groups for which that holds."""
    groups_of: dict[str, list[str]] = {}
    for group in (baseline, *others) if len(baseline.runs) > 1 else others:
        groups_of.setdefault(check_groups(baseline, group).text, []).append(group.name)
    return [(listed(names), text) for text, names in groups_of.items()]


def _baseline_first(groups: list[Group], name: str | None) -> list[Group]:
    if name is None:
        return groups
    named = [g for g in groups if name in (g.name, *(run.run_id for run in g.runs), *(run.name for run in g.runs))]
    named = named or [group for group in groups if name in group.name]
    if len(named) != 1:
        names = ", ".join(group.name for group in groups)
        many = "several groups have this in their name" if named else "no group has this name"
        raise ConfigError("baseline", name, f"{many}; there are: {names}")
    return [named[0], *(group for group in groups if group is not named[0])]


def _refuse_if_nothing_is_left(baseline: Group, others: Sequence[Group], refused: dict[str, str]) -> None:
    if not baseline.runs:
        run = baseline.example
        remedy = "; choose another with baseline=" if others else ""
        raise RecordError(f"{baseline.name}: none of its runs finished: {run.status}: {run.error or '-'}{remedy}")
    alive = [group.name for group in others if group.runs]
    if alive and all(name in refused for name in alive):
        raise RecordError(
            f"{alive[0]} and {baseline.name} cannot be compared: {refused[alive[0]]}. Where that is what you "
            "compare, name the keys in by=; force=true compares all the same"
        )


def _differences(groups: Sequence[Group]) -> dict[str, tuple[str, ...]]:
    runs = [group.example for group in groups]
    keys = short_keys(runs, differing([settings(run) for run in runs])) if len(runs) > 1 else []
    differences = {key: tuple(_values(group, key) for group in groups) for key in keys}
    commits = tuple(str(run.facts.get("environment", {}).get("git.commit", "-"))[:10] for run in runs)
    return differences | {"git commit": commits} if len(set(commits)) > 1 else differences


def _values(group: Group, key: str) -> str:
    values = dict.fromkeys(str(value_of(run, key)) for run in (group.runs or [group.example]))
    return ", ".join("null" if value == "None" else value for value in values)


def _title(sets: Sequence[RunSet], groups: Sequence[Group]) -> str:
    if len(groups) > 2:
        return f"{len(groups)} configurations: {sets[0].name}"
    return " against ".join(group.name for group in reversed(groups))
