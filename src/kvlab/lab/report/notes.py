"""What a reader has to know to trust a report: how it was computed, and what speaks against it."""

from collections.abc import Mapping, Sequence

from kvlab.lab.compare.groups import Group, pairs_of, repeated
from kvlab.lab.report.options import ReportOptions
from kvlab.lab.results.sureness import how_far_off
from kvlab.lab.results.tables import count

_MACHINE = ("machine", "device", "threads")
_NAMED = 4  # groups of which the same is said


def method_notes(groups: Sequence[Group], options: ReportOptions) -> list[str]:
    """How the figures were computed, in sentences."""
    far = how_far_off((run.facts for group in groups for run in group.runs), compared=len(groups) > 1)
    said = [f"{far[0].upper()}{far[1:]}."] if far else []
    if len(groups) == 1:
        return [f"Figures are medians of {count(len(groups[0].runs), 'run')}.", *said]
    baseline, others = groups[0], [group for group in groups[1:] if group.runs]
    paired = [group for group in others if pairs_of(baseline, group)]
    single = [group for group in others if group not in paired and min(len(group.runs), len(baseline.runs)) < 2]
    welch = [group for group in others if group not in paired and group not in single]
    notes = []
    if paired:
        mixed = any(group.mixed for group in (baseline, *paired))
        pairing = "point by point, alike in all else" if mixed else "repeat by repeat, for they ran in turns"
        notes.append(
            f"{_which(paired, others)} compared {pairing}: delta is the median of the ratios, the interval (t, "
            f"{options.confidence:g} %) that of their geometric mean. What both of a pair have in common cancels."
        )
    if welch:
        notes.append(
            f"{_which(welch, others)} compared as independent samples: delta is the ratio of the medians, the "
            f"interval (Welch, {options.confidence:g} %) that of the ratio of geometric means."
        )
    more = "`kvlab run -m repeats=5` gives repeats, in turns."
    if baseline.runs and baseline.example.simulated:
        more = "`kvlab run -m seed=0,1,2,3,4` simulates other requests; name in by= what to compare over them."
    if single:
        text = f"{_which(single, others)} shown without interval and verdict: one run says nothing about chance."
        notes.append(f"{text} {more}")
    if any(repeated(group.runs) for group in groups):
        notes.append(
            f"Repeats of a simulation are the same to the last digit, and say nothing about chance: {more}"
        )
    if paired or welch:
        notes.append(
            "A word other than `same` stands only where the whole interval lies beyond "
            f"{options.min_effect:g} %; `same` means that no difference was shown: the interval tells how "
            "large one could be."
        )
    return notes + said


def warnings(groups: Sequence[Group], obstacles: Mapping[str, str], options: ReportOptions) -> list[str]:
    """What speaks against the comparison."""
    texts = [
        f"{group.name}: {len(group.left_out)} of {count(len(group.left_out) + len(group.runs), 'run')} left out "
        f"({group.endings})."
        for group in groups
        if group.left_out
    ]
    alive = {group.name for group in groups if group.runs}
    names_of: dict[str, list[str]] = {}
    for name, reason in obstacles.items():
        if options.force or name in alive:
            names_of.setdefault(reason, []).append(name)
    for reason, names in names_of.items():
        said = f"no verdict: {reason}. by= makes keys what is compared; force=true ignores this."
        if options.force:
            said = f"compared because of force=true although {reason}."
        texts.append(f"{listed(names)}: {said}")
    runs = [run for group in groups for run in group.runs]
    # What a run simulates is a setting of it, which stands among the differences; its own machine decides nothing.
    measured = [run for run in runs if not run.simulated]
    for fact in _MACHINE:
        values = {str(run.facts[fact]) for run in measured if fact in run.facts}
        if len(values) > 1:
            texts.append(f"The runs were not all on the same {fact}: {'; '.join(sorted(values))}.")
    if 0 < len(measured) < len(runs):
        texts.append(f"Runs: {len(measured)} measured, {len(runs) - len(measured)} simulated.")
    return texts + [
        f"{group.name}: ran all before or all after {groups[0].name}: a machine that became slower meanwhile looks "
        "like a difference. A sweep with repeats= runs them in turns."
        for group in groups[1:]
        if _ran_apart(groups[0], group)
    ]


def listed(names: Sequence[str]) -> str:
    """The first names of groups, and how many more there are."""
    return ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)


def _ran_apart(baseline: Group, group: Group) -> bool:
    """Whether all of one was measured before any of the other: then the machine's drift looks like a difference."""
    first, second = (
        [run.facts["started"] for run in g.runs if "started" in run.facts and not run.simulated]
        for g in (baseline, group)
    )
    return min(len(first), len(second)) > 1 and (max(first) <= min(second) or max(second) <= min(first))


def _which(some: Sequence[Group], others: Sequence[Group]) -> str:
    if len(some) == len(others):
        return "Groups are"
    names = ", ".join(group.name for group in some[:3])
    return f"{names}{' and others' if len(some) > 3 else ''} {'is' if len(some) == 1 else 'are'}"
