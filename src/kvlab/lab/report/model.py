"""A report as plain values, which its three forms (terminal, Markdown, HTML) write."""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvlab.lab.compare.gate import Finding
from kvlab.lab.compare.groups import Group
from kvlab.lab.results.answers import Answer


class Cell(NamedTuple):
    """A group's value in a row: the median, and how it differs from the baseline's; empty where it has none."""

    value: str
    delta: str = ""
    interval: str = ""
    word: str = ""
    tone: str = ""  # good, bad or plain
    dots: tuple[float, ...] = ()  # each run's value


class Row(NamedTuple):
    """A metric in every group; the first cell is the baseline's."""

    section: str
    label: str
    metric: str
    cells: tuple[Cell, ...]


class Image(NamedTuple):
    """A figure as PNG, and the group it shows; None for all."""

    name: str
    group: str | None
    png: bytes

    @property
    def caption(self) -> str:
        """What it shows."""
        return self.group or "all runs"


@dataclass(slots=True)
class Report:
    """Everything a report says. `groups` begin with the baseline; `headlines` has a sentence for each other one."""

    title: str
    groups: list[Group]
    differences: dict[str, tuple[str, ...]]  # settings that are not the same in all groups: each group's value
    headlines: list[str]
    rows: list[Row]
    outputs: list[tuple[str, str]]  # groups, and whether their tokens are the baseline's
    method: list[str]
    warnings: list[str]
    findings: list[Finding]
    answers: list[tuple[str, list[Answer]]] = field(default_factory=list)  # groups, and some of their words
    images: list[Image] = field(default_factory=list)
    interactive: list[tuple[str, str]] = field(default_factory=list)  # title and HTML, without plotly.js
    left_out: list[str] = field(default_factory=list)  # figures that there are not, and why

    @property
    def violated(self) -> bool:
        """Whether a condition of the gate is."""
        return any(finding.violated for finding in self.findings)
