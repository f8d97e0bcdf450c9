"""Recorded runs as points: the settings in which they differ, and a metric over one or two of these."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvlab.lab.compare.groups import differing, settings, short_keys, value_of
from kvlab.lab.results.records import RunRecord
from kvlab.lab.settings import measured

THROUGHPUT = "throughput/output_tokens_per_s"


@dataclass(frozen=True, slots=True)
class Point:
    """A run among others: the settings in which they differ, what it measured, how it ended."""

    config: Mapping[str, object]
    metrics: Mapping[str, float]
    status: str = "finished"
    name: str = ""

    def value(self, metric: str) -> float | None:
        """The metric, if the run finished and has it."""
        value = self.metrics.get(metric) if self.status == "finished" else None
        return None if value is None or math.isnan(value) else value


class Grid(NamedTuple):
    """A metric over two settings: medians `[rows, columns]`, NaN where there is none, and the share of points that
    failed in each cell (NaN where no point was).
    """

    row_key: str
    column_key: str
    rows: list[Any]
    columns: list[Any]
    values: NDArray[np.float64]
    failed: NDArray[np.float64]

    @property
    def footnote(self) -> str:
        """What a star in a cell means, where one has it."""
        return "* some of its repeats failed" if ((self.failed > 0) & (self.failed < 1)).any() else ""


class Points(list[Point]):
    """Runs that are shown together."""

    @classmethod
    def of(cls, records: Sequence[RunRecord]) -> Self:
        """Each with the settings in which they differ, as one would give them on the command line: a group's choice
        (`workload`) stands for all that it decides.
        """
        keys = short_keys(records, differing([settings(record) for record in records]), ("hardware", "framework"))
        return cls(
            Point({key: value_of(record, key) for key in keys}, record.metrics, record.status, record.name)
            for record in records
        )

    def varied_keys(self) -> list[str]:
        """The settings in which points differ, without those that only name, record or repeat runs."""
        keys = differing([measured(point.config, any_repeat=True) for point in self])
        return [key for key in keys if key != "seed" and not key.startswith("debug.")]

    def varied_amounts(self) -> list[str]:
        """The one or two settings in which points differ, where they are numbers; else none."""
        keys = self.varied_keys()
        numbers = all(is_number(point.config.get(key)) for key in keys for point in self)
        return keys if numbers and len(keys) <= 2 else []

    def by_settings(self, keys: Sequence[str]) -> dict[str, Self]:
        """Points that have these settings alike, which are repeats of each other, by their settings' text without
        the names of the groups.
        """
        groups: dict[str, Self] = {}
        for point in self:
            label = ", ".join(f"{key.split('.', 1)[-1]}={point.config.get(key)}" for key in keys)
            groups.setdefault(label or point.name or "run", type(self)()).append(point)
        return groups

    def values(self, metric: str) -> list[float]:
        """The metric of the points that have it."""
        return [value for point in self if (value := point.value(metric)) is not None]

    def with_value(self, key: str, value: object) -> Self:
        """The points with this value of a setting."""
        return type(self)(point for point in self if point.config.get(key) == value)

    def values_over(self, key: str, metric: str) -> dict[Any, list[float]]:
        """The metric of the points that have it, by each value of a setting; no value for one where none has it."""
        return {x: self.with_value(key, x).values(metric) for x in self.ordered(key)}

    def ordered(self, key: str) -> list[Any]:
        """A setting's values: numbers by size, others in the order of the points."""
        values = list({repr(value): value for point in self for value in [point.config.get(key)]}.values())
        return sorted(values) if all(map(is_number, values)) else values

    def grid(self, keys: Sequence[str], metric: str) -> Grid:
        """A metric by two settings. A cell is the median of the points that have both settings alike."""
        row_key, column_key = keys
        rows, columns = self.ordered(row_key), self.ordered(column_key)
        values, failed = np.full((2, len(rows), len(columns)), math.nan)
        for row, column in np.ndindex(values.shape):
            cell = self.with_value(row_key, rows[row]).with_value(column_key, columns[column])
            known = cell.values(metric)
            if cell:
                failed[row, column] = 1 - len(known) / len(cell)
            if known:
                values[row, column] = median(known)
        return Grid(row_key, column_key, rows, columns, values, failed)


def is_number(value: object) -> bool:
    """Whether a setting's value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
