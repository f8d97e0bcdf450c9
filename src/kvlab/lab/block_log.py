"""blocks.parquet: what happened to each block of a run's pool, written and read back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvlab.kv.journal import BlockEvent, BlockEvents

BLOCKS = "blocks.parquet"
_EVENTS = [event.name.lower() for event in BlockEvent if event is not BlockEvent.SEATED]


def write_blocks(directory: Path, events: BlockEvents, rows: Sequence[int]) -> None:
    """Write a run's block events: `step`, `block`, `event` by name, and the `sequence` whose reference it was as
    its row in requests.parquet, -1 for none. `rows[i]` is the row of the journal's i-th tenant.
    """
    names = pa.DictionaryArray.from_arrays(pa.array(events.event), pa.array(_EVENTS))
    row_of = np.append(np.asarray(rows, dtype=np.int32), np.int32(-1))  # the last is what -1 finds
    columns = {"step": events.step, "block": events.block, "event": names, "sequence": row_of[events.sequence]}
    pq.write_table(pa.table(columns), directory / BLOCKS)


def read_blocks(directory: Path) -> BlockEvents | None:
    """A run's block events, sequences as rows of requests.parquet; None where the run kept none."""
    if not (directory / BLOCKS).is_file():
        return None
    table = pq.read_table(directory / BLOCKS)
    names = table["event"].combine_chunks().dictionary_encode()
    number = np.array([_EVENTS.index(name) for name in names.dictionary.to_pylist()], dtype=np.int8)
    return BlockEvents(
        step=table["step"].to_numpy(),
        event=number[names.indices.to_numpy()] if len(names) else np.empty(0, dtype=np.int8),
        block=table["block"].to_numpy(),
        sequence=table["sequence"].to_numpy(),
    )
