"""What a metric is: its name, label, unit, formula, direction, digits and section."""

from dataclasses import dataclass

from kvlab.config import format_bytes

FURTHER = "further metrics"  # the section of a metric that has no entry


@dataclass(frozen=True, slots=True)
class Direction:
    """Whether more of a metric is better (None: neither), and the words for more and for less of it."""

    more_is_better: bool | None
    more: str
    less: str


SPEED, TIME = Direction(True, "faster", "slower"), Direction(False, "slower", "faster")
GAIN, COST = Direction(True, "better", "worse"), Direction(False, "worse", "better")
NEUTRAL = Direction(None, "higher", "lower")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric and how to write it. `name` is the one in summary.json and in the tracking store."""

    name: str
    label: str
    unit: str = ""  # of a count, what is counted
    formula: str = ""  # for docs/metrics.md; terms in `backquotes` are metrics
    direction: Direction = NEUTRAL
    digits: int = 2  # after the decimal point
    in_table: bool = False  # whether the table of a run shows it
    column: str = ""  # its heading in the table of a sweep's points, which shows those that have one
    alone: str = ""  # its label where it stands without the rows of its table
    family: str = ""  # the name in docs/metrics.md of all that share its formula
    section: str = FURTHER
    optional: bool = False  # a table that would show it leaves it out where no run has it

    @property
    def axis(self) -> str:
        """The label with its unit, for the axis of a figure."""
        label = self.alone or self.label
        if self.unit.endswith("/s"):
            return f"{label} per second"
        return f"{label}, {self.unit}" if self._has_written_unit else label

    def text(self, value: float | None, *, digits: int | None = None, unit: bool = True) -> str:
        """A value for people, a dash for None. A count has no unit in its text: the label says what is counted."""
        if value is None:
            return "-"
        if self.unit == "bytes":
            return format_bytes(value)
        written = f" {self.unit}" if unit and self._has_written_unit else ""
        return f"{value:,.{self.digits if digits is None else digits}f}{written}"

    @property
    def _has_written_unit(self) -> bool:
        return self.unit in ("bytes", "s", "ms", "%", "J", "kWh") or self.unit.endswith("/s")
