"""The pages name what exists: files, links, choices and commands."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kvlab.cli.capacity import CapacitySettings
from kvlab.cli.roofline import RooflineSettings
from kvlab.lab.campaigns.tune.settings import TuneSettings
from kvlab.lab.report.options import ReportOptions
from kvlab.registry import registry
from tests.support.plans import compose_run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs both make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere_in_the_repository(page: Path) -> None:
    text = re.sub(r"`[^`]*`", "", prose(page))
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text)
    for target, _, anchor in ((a or b).partition("#") for a, b in targets):
        if target.startswith(("http://", "https://")):
            continue
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{name(page)}: {target}"
        if anchor:
            assert anchor in anchors(found), f"{name(page)}: {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_it_names_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return
    roots = (ROOT, ROOT / "src", ROOT / "tests", page.parent, ROOT / "src/kvlab", *(ROOT / "src/kvlab").iterdir())
    bare = {path.name for folder in ("src", "tests", "experiments") for path in (ROOT / folder).rglob("*.*p*")}
    for file in re.findall(r"`(\w+\.(?:py|hpp|cpp))`", prose(page)):
        assert file in bare, f"{name(page)}: {file}"
    for path in re.findall(r"`((?:[\w-]+/)+[\w.-]*\.(?:py|ya?ml|hpp|cpp|feature|md)|(?:[\w-]+/)+)`", prose(page)):
        if not path.startswith(("outputs/", "multirun/", "figures/", "mlartifacts/", "site/", "quality/")):
            assert any((root / path).exists() for root in roots), f"{name(page)}: {path}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_it_names_exist(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = re.findall(r"(?:`|^    )make ([\w-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) <= set(targets)


def test_its_commands_for_windows_have_longer_sequences_than_a_window() -> None:
    """Else both ways of keeping a sequence hold the same."""
    row = next(line for line in prose(ROOT / "README.md").splitlines() if "sliding window" in line)
    commands = re.findall(r"`kvlab (?:capacity|run) ([^`]+)`", row)
    assert len(commands) == 2
    for command in commands:
        own = [word for word in command.split() if word.startswith("model")]
        model = compose_run(*own).model
        assert model.architecture is not None
        assert model.max_seq_len > model.architecture["sliding_window"], command


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("group", ["attention", "debug", "executor", "kv", "model", "scheduler", "workload"])
def test_run_page_names_every_choice(group: str) -> None:
    (row,) = re.findall(rf"^\| `{group}` \|(.*)$", (ROOT / "docs/commands/run.md").read_text(), re.MULTILINE)
    choices = re.findall(r"`(\w+)`", row.split(" | ")[0])
    assert sorted(choices) == sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))


def test_batching_page_names_every_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/concepts/batching.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(registry("scheduler.order").names())


@pytest.mark.parametrize(
    ("page", "schema"),
    [
        ("tune", TuneSettings),
        ("report", ReportOptions),
        ("capacity", CapacitySettings),
        ("roofline", RooflineSettings),
    ],
    ids=str,
)
def test_command_page_names_every_setting(page: str, schema: type) -> None:
    text = (ROOT / f"docs/commands/{page}.md").read_text()
    for field in dataclasses.fields(schema):
        spellings = (f"{field.name}=", f"{field.name}.", f"--{field.name.replace('_', '-')}")
        assert any(spelling in text for spelling in spellings), field.name


def test_sweeps_page_names_every_sweep() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/commands/sweeps.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(path.stem for path in (ROOT / "conf/sweep").glob("*.yaml"))


def test_index_of_experiments_is_complete() -> None:
    linked = re.findall(r"\.\./experiments/(\w+)/README\.md", (ROOT / "docs/experiments.md").read_text())
    assert sorted(linked) == sorted(path.parent.name for path in ROOT.glob("experiments/*/README.md"))
