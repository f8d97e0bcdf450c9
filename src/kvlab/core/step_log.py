"""The steps of a run as columns: long runs have hundreds of thousands."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Self, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvlab.core.pool import PoolCounters, PoolStats
from kvlab.core.records import StepRecord

_OF_STEP = [column for column in fields(StepRecord) if column.name not in ("pool", "counters")]
_FLOATS = [column.name for column in _OF_STEP if column.type == "float"]
_INTS = [column.name for column in _OF_STEP if column.type == "int"]
_WHOLE = [*_INTS, "has_pool", *(f"pool.{name}" for name in PoolStats._fields), "has_counters"] + [
    f"counters.{name}" for name in PoolCounters._fields
]
_INDEX = {name: index for index, name in enumerate(_WHOLE)}
_floats, _ints = attrgetter(*_FLOATS), attrgetter(*_INTS)
_HAS_POOL, _HAS_COUNTERS = _INDEX["has_pool"], _INDEX["has_counters"]
_OF_A_LINE = 8  # figures in a line of a processor's cache
_NO_POOL, _NO_COUNTERS = (0,) * (1 + len(PoolStats._fields)), (0,) * (1 + len(PoolCounters._fields))


class StepLog(Sequence[StepRecord]):
    """Records of steps that take 8 bytes a figure. A record is made when it is asked for."""

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        self._floats, self._whole = array("d"), array("q")
        for record in records:
            self.append(record)

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> StepLog:
        """These records, which may be a log already."""
        return records if isinstance(records, StepLog) else cls(records)

    @classmethod
    def of_columns(
        cls, pools: Sequence[tuple[int, PoolStats, PoolCounters]], columns: Mapping[str, ArrayLike], count: int
    ) -> Self:
        """`count` steps. `pools`: the pool from which step on, the first included, and what that one step added to
        its counters. `columns`, named as in `column`, have a number for all or one for each; others are 0.
        """
        floats, whole = np.zeros((count, len(_FLOATS))), np.zeros((count, len(_WHOLE)), dtype=np.int64)
        places, stats, counters = zip(*pools, strict=True)
        lasting = np.diff([*places, count])
        whole[:, _HAS_POOL:_HAS_COUNTERS] = np.repeat([(1, *stat) for stat in stats], lasting, axis=0)
        whole[:, _HAS_COUNTERS] = 1
        whole[places, _HAS_COUNTERS + 1 :] = counters
        for name, values in columns.items():
            if name in _INDEX:
                whole[:, _INDEX[name]] = values
            else:
                floats[:, _FLOATS.index(name)] = values
        found = cls()
        found._floats.frombytes(floats.tobytes())
        found._whole.frombytes(whole.tobytes())
        return found

    def extend(self, steps: StepLog) -> None:
        """Add steps at the end."""
        self._floats.extend(steps._floats)
        self._whole.extend(steps._whole)

    def append(self, record: StepRecord) -> None:
        """Add a step at the end."""
        pool, counters = record.pool, record.counters
        self._floats.extend(_floats(record))
        self._whole.extend(
            (
                *_ints(record),
                *(_NO_POOL if pool is None else (1, *pool)),
                *(_NO_COUNTERS if counters is None else (1, *counters)),
            )
        )

    def sort(self) -> None:
        """Order the steps of several replicas as they began, and number them anew; of equals that of the lower
        number first.
        """
        floats, whole = self._tables
        order = np.lexsort((whole[:, _INDEX["index"]], whole[:, _INDEX["replica"]], self.column("start_s")))
        for figures in (floats, whole):
            # As many columns at once as a cache line has, in place: a second copy of all would not fit everywhere.
            for first in range(0, figures.shape[1], _OF_A_LINE):
                columns = figures[:, first : first + _OF_A_LINE]
                columns[:] = columns[order]
        whole[:, _INDEX["index"]] = np.arange(len(order))

    def of_replica(self, replica: int) -> StepLog:
        """The steps of one replica."""
        return self._rows(np.flatnonzero(self.column("replica") == replica))

    @property
    def _tables(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The figures as rows of steps, not copied: a log cannot grow while they are looked at."""
        return np.asarray(self._floats).reshape(-1, len(_FLOATS)), np.asarray(self._whole).reshape(-1, len(_WHOLE))

    def _rows(self, rows: NDArray[np.int64]) -> StepLog:
        log, (floats, whole) = StepLog(), self._tables
        log._floats.frombytes(floats[rows].tobytes())
        log._whole.frombytes(whole[rows].tobytes())
        return log

    def column(self, name: str, first: int = 0) -> NDArray[Any]:
        """A field of all steps from the `first` on: a name of StepRecord's, or `pool.` or `counters.` before one of
        those; 0 where a step has none (`has_pool`, `has_counters`). A copy.
        """
        floats, whole = self._tables
        rows: NDArray[Any] = whole[:, _INDEX[name]] if name in _INDEX else floats[:, _FLOATS.index(name)]
        return rows[first:].copy()

    @property
    def seconds(self) -> NDArray[np.float64]:
        """How long each step took."""
        seconds: NDArray[np.float64] = self.column("end_s") - self.column("start_s")
        return seconds

    def __len__(self) -> int:
        return len(self._floats) // len(_FLOATS)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...

    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        chosen = range(len(self))[index]
        return self._record(chosen) if isinstance(chosen, int) else [self._record(number) for number in chosen]

    def _record(self, index: int) -> StepRecord:
        floats, whole = len(_FLOATS), len(_WHOLE)
        values: dict[str, Any] = dict(
            zip(_FLOATS, self._floats[floats * index : floats * (index + 1)], strict=True)
        )
        numbers = self._whole[whole * index : whole * (index + 1)].tolist()
        return StepRecord(
            **values,
            **dict(zip(_INTS, numbers, strict=False)),
            pool=PoolStats(*numbers[_HAS_POOL + 1 : _HAS_COUNTERS]) if numbers[_HAS_POOL] else None,
            counters=PoolCounters(*numbers[_HAS_COUNTERS + 1 :]) if numbers[_HAS_COUNTERS] else None,
        )
