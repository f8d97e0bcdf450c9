"""The list of requirements and the scenarios agree, and the page that is written of them tells the truth."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest

from features.requirements import (
    PAGE,
    Recorder,
    Requirement,
    Scenario,
    disagreements,
    page,
    read_requirements,
    read_scenarios,
    run_scenarios,
)
from kvlab.errors import ConfigError

FEATURE = """\
@R2.1
Feature: Doors

  @R1.1
  Scenario: Open
    When a door is opened

  Rule: All of them

    @R1.2 @slow
    Scenario Outline: Close <door>
      When a door is closed

      Examples:
        | door |
        | a    |
        | b    |
"""
FIRST, SECOND = Requirement("R1.1", "Doors open", "R1 Doors"), Requirement("R1.2", "Doors close", "R1 Doors")
ENTRY, HALL = Requirement("R2.1", "There are doors", "R2 House"), Requirement("R2.2", "A hall", "R2 House")


def test_every_requirement_has_a_scenario_and_every_tag_is_a_requirement() -> None:
    assert disagreements(read_requirements(), read_scenarios()) == []


def test_the_list_is_whole() -> None:
    """67 ids in 13 chapters to begin with; a requirement may be added, and none is dropped quietly."""
    requirements = read_requirements()
    assert len({requirement.id for requirement in requirements}) == len(requirements) >= 67
    assert all(requirement.sentence for requirement in requirements)


def test_the_page_has_every_requirement() -> None:
    text = PAGE.read_text()
    assert "make requirements" in text
    for requirement in read_requirements():
        assert f"**{requirement.id}** {requirement.sentence}" in text


@pytest.fixture
def scenarios(tmp_path: Path) -> list[Scenario]:
    (tmp_path / "doors.feature").write_text(FEATURE)
    return read_scenarios(tmp_path)


def test_tags_of_feature_and_scenario_count(scenarios: list[Scenario]) -> None:
    first, second = scenarios
    assert (first.name, first.place, first.tags) == ("Open", ("doors.feature", 5), frozenset({"R2.1", "R1.1"}))
    assert (second.name, second.tags) == ("Close <door>", frozenset({"R2.1", "R1.2", "slow"}))


def test_an_id_without_a_scenario_is_reported(scenarios: list[Scenario]) -> None:
    assert disagreements([FIRST, SECOND, ENTRY, HALL], scenarios) == ["R2.2 has no scenario: tag one with @R2.2"]


def test_a_tag_that_is_no_id_is_reported_with_its_place(scenarios: list[Scenario]) -> None:
    assert disagreements([FIRST, ENTRY], scenarios) == [
        "doors.feature:11 (Close <door>): @R1.2 is not in requirements.yaml"
    ]


def test_a_scenario_that_shows_nothing_is_reported() -> None:
    scenario = Scenario(("doors.feature", 5), "Open", frozenset({"slow"}))
    assert disagreements([], [scenario]) == [
        "doors.feature:5 (Open): shows no requirement; tag it with an id of requirements.yaml"
    ]


def test_a_name_that_a_file_has_twice_is_reported() -> None:
    scenarios = [
        Scenario((file, line), "Open", frozenset({"R1.1"})) for file, line in (("a", 5), ("b", 5), ("b", 9))
    ]
    assert disagreements([FIRST], scenarios) == [
        "b:9 (Open): another scenario of the file has this name; give it one of its own"
    ]


def test_an_id_in_the_wrong_chapter_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text("R1: {title: Doors, requirements: {R2.1: Doors open}}")
    with pytest.raises(ConfigError, match=r"R2\.1=R1: stands in another chapter"):
        read_requirements(file)


def test_the_page_lists_what_passed_and_what_did_not(scenarios: list[Scenario]) -> None:
    open_, close = (scenario.place for scenario in scenarios)
    outcomes = {open_: Counter(passed=1), close: Counter(passed=1, failed=1)}
    text = page([FIRST, SECOND, HALL], scenarios, outcomes, date(2026, 1, 2))
    assert "on 2026-01-02: of 1 of 3 requirements all scenarios passed" in text
    assert "Of 2 scenarios 2 ran, with 3 examples: 2 passed, 1 failed, 0 skipped." in text
    assert "- passed: Open (`doors.feature`)" in text
    assert "- **1 passed, 1 failed**: Close \\<door> (`doors.feature`)" in text
    assert "**R2.2** A hall\n\n- **no scenario**" in text
    close_passed = page([SECOND], scenarios, {close: Counter(passed=2)}, date(2026, 1, 2))
    assert "- passed, 2 examples: Close \\<door>" in close_passed
    assert "- **not run**: Open" in page([FIRST], scenarios, {}, date(2026, 1, 2))


def test_results_are_collected_by_scenario(tmp_path: Path, scenarios: list[Scenario]) -> None:
    (tmp_path / "test_doors.py").write_text(
        "from pytest_bdd import scenarios, when\n"
        "import pytest\n"
        "scenarios('doors.feature')\n"
        "@when('a door is opened')\n"
        "def _(): pass\n"
        "@when('a door is closed')\n"
        "def _(request): assert 'a' not in request.node.callspec.id\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    outcomes = run_scenarios(tmp_path)
    assert outcomes == {
        scenarios[0].place: Counter(passed=1),
        scenarios[1].place: Counter(passed=1, failed=1),
    }


def test_a_test_that_is_no_scenario_is_left_out() -> None:
    class Report:
        nodeid, when, outcome = "tests/test_x.py::test_y", "call", "passed"

    recorder = Recorder()
    recorder.pytest_collection_modifyitems([SimpleNamespace(obj=print)])
    recorder.pytest_runtest_logreport(Report())
    assert recorder.outcomes == {}


def test_it_is_a_command() -> None:
    """`make requirements` runs it; a module without an entry would end at once, and the page stay as it was."""
    asked = subprocess.run(
        [sys.executable, "-m", "features.requirements", "--help"], capture_output=True, text=True, check=True
    )
    assert asked.stdout.startswith("make requirements: run every scenario")
