"""A report as plain values: what its three forms write."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlab.lab.compare.gate import Finding
from kvlab.lab.compare.groups import Group


@dataclass(frozen=True, slots=True)
class Cell:
    """A group's figure in a line: the median, and how it differs from the baseline's; empty where it has none."""

    value: str
    delta: str = ""
    interval: str = ""
    word: str = ""
    tone: str = ""  # good, bad, plain
    dots: tuple[float, ...] = ()  # each run's value


@dataclass(frozen=True, slots=True)
class Line:
    """A metric in every group; the first cell is the baseline's."""

    section: str
    label: str
    metric: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that is not the same in all groups, with each group's value."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure as PNG, and the group it shows; None for all."""

    name: str
    group: str | None
    png: bytes


@dataclass(slots=True)
class Report:
    """Everything a report says. `groups` begin with the baseline; `headlines` has a sentence for each other one."""

    title: str
    groups: list[Group]
    differences: list[Difference]
    headlines: list[str]
    lines: list[Line]
    outputs: list[tuple[str, str]]  # groups, and whether their tokens are the baseline's
    method: list[str]
    warnings: list[str]
    findings: list[Finding] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    interactive: list[tuple[str, str]] = field(default_factory=list)  # title and HTML, without plotly.js

    @property
    def violated(self) -> bool:
        """Whether a condition of the gate is."""
        return any(finding.violated for finding in self.findings)
