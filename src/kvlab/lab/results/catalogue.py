"""What a metric is, and every one of a run, as catalogue.yaml has it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from kvlab.config import format_bytes

#: Columns of steps.parquet that the tracking store follows as `series/<name>`.
SERIES = (
    *("running", "waiting", "blocks_in_use", "blocks_cached", "shared_blocks", "tokens_in_use"),
    *("blocks_allocated", "blocks_freed", "evicted_blocks", "prefill_tokens", "decode_tokens"),
)

#: Percentages that it follows beside them, made of those columns.
SHARES = ("kv_usage_percent", "fragmentation_percent")

TENANT_HITS = "kv/prefix_hit_rate/"  # how the hit rate of one tenant is called, before its salt
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
        digits = self.digits if digits is None else digits
        if self.unit.endswith("/s") and 0 < abs(value) < 10 ** (1 - digits):  # of a log of weeks: not 0.00
            return f"{value:.2g}{written}"
        return f"{value:,.{digits}f}{written}"

    @property
    def _has_written_unit(self) -> bool:
        return self.unit in ("bytes", "s", "ms", "%", "J", "kWh") or self.unit.endswith("/s")


_DIRECTIONS = {"speed": SPEED, "time": TIME, "gain": GAIN, "cost": COST, "neutral": NEUTRAL}


def metric(name: str) -> Metric:
    """The entry of a metric; one that has none, such as a user's own, has its name for a label and no direction."""
    if name not in CATALOGUE and name.startswith(TENANT_HITS):
        entry, salt = CATALOGUE[f"{TENANT_HITS}<salt>"], name.removeprefix(TENANT_HITS)
        return replace(entry, name=name, label=entry.label.replace("<salt>", salt))
    return CATALOGUE.get(name) or Metric(name, name)


def direction(name: str) -> Direction:
    """What a difference in this metric means."""
    return metric(name).direction


def sections() -> dict[str, list[Metric]]:
    """The whole catalogue by section."""
    by_section: dict[str, list[Metric]] = {}
    for entry in CATALOGUE.values():
        by_section.setdefault(entry.section, []).append(entry)
    return by_section


def _read_catalogue() -> dict[str, Metric]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml takes a tenth of the time
    by_section = yaml.load(text, loader)
    entries = (
        entry
        for section, metrics in by_section.items()
        for name, values in metrics.items()
        for entry in _entries(name, section=section, **values)
    )
    return {entry.name: entry for entry in entries}


def _entries(name: str, *, direction: str = "neutral", parts: Any = None, **values: Any) -> Iterator[Metric]:
    """The metric of an entry of the file, or one for each of its parts."""
    entry = Metric(name, direction=_DIRECTIONS[direction], **values)
    if parts is None:
        yield entry
        return
    for part, own in parts.items() if isinstance(parts, dict) else ((part, {}) for part in parts):
        named: dict[str, Any] = {key: re.sub(r"\*|<part>", part, getattr(entry, key)) for key in ("name", "label")}
        yield replace(entry, family=name, **named, **own)


CATALOGUE = _read_catalogue()
