"""Traces as Parquet: the fields of requests as columns, the header in the metadata (docs/reference/trace.md). And
tables of others.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field
from datetime import date
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvlab.errors import WorkloadError, shown

_KEY = b"kvlab_trace"
_ROWS = 8192  # of a group, which is what is in memory at once
_TYPES: dict[Any, pa.DataType] = {
    int: pa.int64(),
    int | None: pa.int64(),
    float | None: pa.float64(),
    str | None: pa.string(),
    Sequence[int] | None: pa.list_(pa.uint64()),
    Sequence[float] | None: pa.list_(pa.float64()),
}


def write_rows(path: Path, header: str, columns: Iterable[Field[Any]], rows: Iterable[Mapping[str, Any]]) -> int:
    """Write requests, by the names of their fields, the `columns`; how many. Raises OSError, and WorkloadError for
    a value of another type.
    """
    count, left = 0, iter(rows)
    schema = pa.schema([(column.name, _TYPES[column.type]) for column in columns])
    try:
        with pq.ParquetWriter(path, schema.with_metadata({_KEY: header.encode()}), compression="zstd") as file:
            while group := [dict(row) for row in islice(left, _ROWS)]:
                file.write_table(pa.Table.from_pylist(group, schema))
                count += len(group)
    except pa.ArrowException as error:
        raise WorkloadError(f"{shown(str(path))}: cannot be written as Parquet: {error}") from error
    return count


def read_first_line(path: str) -> bytes:
    """What the first line of the trace would be, b"" where it is none. Raises WorkloadError."""
    metadata: dict[bytes, bytes] = _opened(path).schema_arrow.metadata or {}
    return metadata.get(_KEY, b"")


def read_table(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of any Parquet file, numbered from 1 on: times as text in ISO 8601, to the microsecond, and decimal
    numbers as whole ones where they are. Raises WorkloadError.
    """
    number = 0
    try:
        for batch in _opened(path).iter_batches(_ROWS):
            columns = [
                column.cast(pa.timestamp("us", column.type.tz), safe=False)
                if pa.types.is_timestamp(column.type)
                else column
                for column in batch.columns
            ]
            for row in pa.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist():
                number += 1
                yield number, _plain(row)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(own) for name, own in value.items()}
    if isinstance(value, date):  # datetime too
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value


def read_rows(path: str, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Requests by these of their fields, with their numbers from 1 on; a column that is not there is None. Raises
    WorkloadError.
    """
    number = 0
    try:
        file = _opened(path)
        there = [name for name in names if name in file.schema_arrow.names]
        for batch in file.iter_batches(_ROWS, columns=there):
            for row in batch.to_pylist():
                number += 1
                yield number, dict.fromkeys(names) | row
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _opened(path: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(Path(path).expanduser())
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> WorkloadError:
    return WorkloadError(f"{shown(path)}: cannot be read as Parquet: {str(error).partition(chr(10))[0]}")
