"""make requirements: run every scenario, and write which requirement they show to docs/requirements.md.

The requirements are in features/requirements.yaml; a scenario says by its tag, @R1.2 for instance, what it shows.
Ends with 1 where one fails or a requirement has no scenario, and with 2 where the list and the tags disagree.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from kvlab.errors import ConfigError, KvlabError, OutputError
from kvlab.lab.files import attempt, write_text

FEATURES = Path(__file__).resolve().parent
LIST = FEATURES / "requirements.yaml"
PAGE = FEATURES.parent / "docs" / "requirements.md"

#: Where a scenario is: the feature file's name and the line of its keyword.
Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Requirement:
    """An id, and what holds."""

    id: str
    sentence: str
    chapter: str


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario, or an outline with all its examples."""

    place: Place
    name: str
    tags: frozenset[str]  # without @; those of its rule and feature included


def read_requirements(file: Path = LIST) -> list[Requirement]:
    """The project's requirements in order. Raises ConfigError for an id that stands in another chapter."""
    import yaml

    found = []
    for chapter, entry in yaml.safe_load(file.read_text(encoding="utf-8")).items():
        for name, sentence in entry["requirements"].items():
            if name.partition(".")[0] != chapter:
                raise ConfigError(str(name), chapter, f"stands in another chapter of {file.name}")
            found.append(Requirement(name, " ".join(sentence.split()), f"{chapter} {entry['title']}"))
    return found


def read_scenarios(folder: Path = FEATURES) -> list[Scenario]:
    """Every scenario of the feature files in a folder, by file and line."""
    from gherkin.parser import Parser

    found = []
    for file in sorted(folder.glob("*.feature")):
        feature = Parser().parse(file.read_text(encoding="utf-8"))["feature"]
        found += list(_scenarios(file.name, feature, frozenset()))
    return found


def _scenarios(file: str, parent: Mapping[str, Any], inherited: frozenset[str]) -> Iterator[Scenario]:
    tags = inherited | {tag["name"].removeprefix("@") for tag in parent["tags"]}
    for child in parent["children"]:
        if rule := child.get("rule"):
            yield from _scenarios(file, rule, tags)
        elif scenario := child.get("scenario"):
            own = {tag["name"].removeprefix("@") for tag in scenario["tags"]}
            yield Scenario((file, scenario["location"]["line"]), scenario["name"], tags | own)


def disagreements(requirements: Sequence[Requirement], scenarios: Sequence[Scenario]) -> list[str]:
    """What list and tags do not agree on, a sentence each: an id without a scenario, a tag that is not an id. And
    names that two scenarios of a file have: pytest-bdd would run only the second.
    """
    ids = {requirement.id for requirement in requirements}
    tagged = {tag for scenario in scenarios for tag in scenario.tags}
    problems = [f"{name} has no scenario: tag one with @{name}" for name in ids - tagged]
    named: set[tuple[str, str]] = set()
    for scenario in scenarios:
        where = f"{scenario.place[0]}:{scenario.place[1]} ({scenario.name})"
        if (name := (scenario.place[0], scenario.name)) in named:
            problems.append(f"{where}: another scenario of the file has this name; give it one of its own")
        named.add(name)
        looks_like_ids = {tag for tag in scenario.tags if tag[:1] == "R" and tag[1:2].isdigit()}
        problems += [f"{where}: @{tag} is not in {LIST.name}" for tag in looks_like_ids - ids]
        if not looks_like_ids:
            problems.append(f"{where}: shows no requirement; tag it with an id of {LIST.name}")
    return sorted(problems)


class Recorder:
    """A pytest plugin that keeps how the examples of each scenario ended."""

    def __init__(self) -> None:
        self.outcomes: dict[Place, Counter[str]] = {}
        self._places: dict[str, Place] = {}

    def pytest_collection_modifyitems(self, items: Iterable[Any]) -> None:
        """Note which scenario each test is an example of."""
        from pytest_bdd.scenario import scenario_wrapper_template_registry as templates

        for item in items:
            function: Any = getattr(item, "obj", None)
            if function in templates:
                template = templates[function]
                self._places[item.nodeid] = (Path(template.feature.filename).name, template.line_number)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test once: by its call, or by what kept it from being called or ended badly after it."""
        place = self._places.get(report.nodeid)
        if place is not None and (report.when == "call" or report.outcome != "passed"):
            self.outcomes.setdefault(place, Counter())[report.outcome] += 1


def page(
    requirements: Sequence[Requirement],
    scenarios: Sequence[Scenario],
    outcomes: Mapping[Place, Mapping[str, int]],
    today: date,
) -> str:
    """The page: totals, then each requirement with its scenarios and how they ended."""
    ended = Counter[str]()
    for counts in outcomes.values():
        ended.update(counts)
    ran = sum(map(bool, outcomes.values()))
    shown = {r.id: [s for s in scenarios if r.id in s.tags] for r in requirements}
    passed = {scenario.place: _passed(outcomes.get(scenario.place, {})) for scenario in scenarios}
    met = sum(bool(mine) and all(passed[s.place] for s in mine) for mine in shown.values())
    lines = [
        "# Requirements",
        "",
        f"Written by `make requirements` on {today.isoformat()}: of {met} of {len(requirements)} requirements all "
        "scenarios passed. "
        f"Of {len(scenarios)} scenarios {ran} ran, with {sum(ended.values())} examples: "
        + ", ".join(f"{ended[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
        + ".",
        "",
        "Ids and sentences are those of `features/requirements.yaml`; a scenario has what it shows as a tag.",
    ]
    chapter = ""
    for requirement in requirements:
        if requirement.chapter != chapter:
            chapter = requirement.chapter
            lines += ["", f"## {chapter}"]
        lines += ["", f"**{requirement.id}** {requirement.sentence}", ""]
        for scenario in shown[requirement.id]:
            result = _result(outcomes.get(scenario.place, {}))
            lines.append(f"- {result}: {_plain(scenario.name)} (`{scenario.place[0]}`)")
        if not shown[requirement.id]:
            lines.append("- **no scenario**")
    return "\n".join(lines) + "\n"


def _passed(counts: Mapping[str, int]) -> bool:
    return counts.get("passed", 0) > 0 and not counts.get("failed")


def _result(counts: Mapping[str, int]) -> str:
    """`passed`, with the number of examples where there are several."""
    total = sum(counts.values())
    if not total:
        return "**not run**"
    parts = [f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if counts.get(outcome)]
    if len(parts) == 1:
        parts = [parts[0].split()[1] + (f", {total} examples" if total > 1 else "")]
    text = ", ".join(parts)
    return text if _passed(counts) else f"**{text}**"


def _plain(name: str) -> str:
    """A name with its `<placeholders>` shown as they are."""
    return name.replace("<", "\\<")


def run_scenarios(folder: Path = FEATURES) -> dict[Place, Counter[str]]:
    """Run the scenarios in a folder with pytest, in this process, and return how they ended."""
    import pytest

    recorder = Recorder()
    # No file of another run, and no process of another worker: what is written is what ran.
    pytest.main([str(folder), "-p", "no:cacheprovider"], plugins=[recorder])
    return recorder.outcomes


def main() -> None:
    """Run the command line."""
    if len(sys.argv) > 1:
        print(__doc__)
        sys.exit(0 if {"-h", "--help"} & set(sys.argv) else 2)
    try:
        requirements, scenarios = read_requirements(), read_scenarios()
    except KvlabError as error:
        sys.exit(f"error: {error}")
    problems = disagreements(requirements, scenarios)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        sys.exit(2)
    outcomes = run_scenarios()
    errors: list[OutputError] = []
    with attempt(errors):
        write_text(PAGE, page(requirements, scenarios, outcomes, date.today()))
    for unwritten in errors:
        print(f"error: {unwritten}", file=sys.stderr)
    failed = [s for s in scenarios if not _passed(outcomes.get(s.place, {}))]
    for scenario in failed:
        print(f"not passed: {scenario.place[0]}:{scenario.place[1]} {scenario.name}", file=sys.stderr)
    print(f"{len(requirements)} requirements, {len(scenarios)} scenarios, {len(failed)} not passed: {PAGE}")
    sys.exit(1 if failed or errors else 0)


if __name__ == "__main__":
    main()
