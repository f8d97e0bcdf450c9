"""What model and attention see of the cache in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.kv.table import BlockTables

if TYPE_CHECKING:
    import torch

    from kvlab.kv.storage import KVStorage


class PlainView(NamedTuple):
    """A view as plain data, of which another process makes the same view of its own storage."""

    new_tokens: NDArray[np.int64]  # of each of the B sequences
    tables: tuple[BlockTables, ...]  # of each group of layers, with B slots

    def of(self, storage: KVStorage) -> CacheView:
        """The view of that `storage`. It is not advanced or rolled back: the first one is."""

        def refuse(*_: object) -> None:
            raise RuntimeError("this view has no pool")

        rows, (first, *others) = np.arange(len(self.new_tokens)), self.tables
        return CacheView(
            first, storage, rows, self.new_tokens, on_advance=refuse, on_rollback=refuse, others=others
        )


class CacheView:
    """The cache as the flat batch of one step sees it: B sequences, T new tokens in all.

    Tensors (`positions`, `slot_mapping`, `query_start`, `seq_lens`, `block_tables`) are on the storage's device.
    The same figures for Python code are in `num_new`, `lengths` and `starts`, plain lists.

    Where layers have block tables by group (see `groups`), what a layer sees is `of_layer(layer)`, and the view
    itself is that of the first group.
    """

    def __init__(
        self,
        tables: BlockTables,
        storage: KVStorage | None,
        slots: NDArray[np.int64],
        new_tokens: NDArray[np.int64],
        *,
        on_advance: Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None], None],
        on_rollback: Callable[[NDArray[np.int64]], None],
        others: Sequence[BlockTables] = (),
    ) -> None:
        """`tables` are those of the first group of layers, `others` those of the other groups."""
        self._tables = tables
        self._storage = storage
        self._slots = slots
        self._new = new_tokens
        self._before = tables.lengths[slots]
        self._after = self._before + new_tokens
        self._stored = tables.stored[slots]
        self._on_advance = on_advance
        self._on_rollback = on_rollback
        self._open = True
        self.block_size = tables.block_size
        self.num_sequences = len(slots)
        self.num_tokens = int(new_tokens.sum())
        self._places = storage.spec.places if storage is not None else ()
        self._gather_rows: dict[tuple[int, int], torch.Tensor] = {}
        self._others: list[CacheView] = []
        for own in others:
            part = CacheView(own, storage, slots, new_tokens, on_advance=on_advance, on_rollback=on_rollback)
            part._open = False
            self._others.append(part)

    @property
    def groups(self) -> list[CacheView]:
        """What the layers of each group see, the first group's first."""
        return [self, *self._others]  # no attribute has itself: a view goes with its last reference

    def of_layer(self, layer: int) -> CacheView:
        """What this layer sees. Only the whole view is advanced or rolled back."""
        return self.groups[self._places[layer][0]] if self._others else self

    @property
    def storage(self) -> KVStorage:
        """The tensors behind the view. Raises RuntimeError for a pool that has none."""
        if self._storage is None:
            raise RuntimeError("this pool is a ledger without tensors")
        return self._storage

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        import torch  # this late: a ledger without tensors, which simulations have, needs none of it

        return self._storage.device if self._storage is not None else torch.device("cpu")

    @cached_property
    def num_new(self) -> list[int]:
        """New tokens of each sequence."""
        counts: list[int] = self._new.tolist()
        return counts

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sequence once the step's are stored."""
        lengths: list[int] = self._after.tolist()
        return lengths

    @cached_property
    def starts(self) -> list[int]:
        """Where each sequence's new tokens begin in the flat batch, and where the last one's end."""
        starts: list[int] = self._starts.tolist()
        return starts

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self._new)])

    @cached_property
    def _token_positions(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Position, block and offset of each new token, on the host."""
        owner = np.repeat(np.arange(self.num_sequences), self._new)
        first = self._before - self._starts[:-1]
        positions = np.arange(self.num_tokens, dtype=np.int64) + first[owner]
        blocks = self._tables.entries[self._slots[owner], positions // self.block_size].astype(np.int64)
        return positions, blocks, positions % self.block_size

    @cached_property
    def positions(self) -> torch.Tensor:
        """`[T]` int64: each new token's position in its sequence."""
        return self._to_device(self._token_positions[0])

    @cached_property
    def slot_mapping(self) -> torch.Tensor:
        """`[T]` int64: `block_id * block_size + offset` of each new token; -1 for one that is stored already."""
        _, blocks, offsets = self._token_positions
        return self._to_device(np.where(self._to_write, blocks * self.block_size + offsets, -1))

    @cached_property
    def query_start(self) -> torch.Tensor:
        """`[B + 1]` int32: where each sequence's new tokens begin in the flat batch."""
        return self._to_device(self._starts.astype(np.int32))

    @cached_property
    def seq_lens(self) -> torch.Tensor:
        """`[B]` int32: tokens of each sequence once the step's are stored."""
        return self._to_device(self._after.astype(np.int32))

    @cached_property
    def block_tables(self) -> torch.Tensor:
        """`[B, max_blocks]` int32: each sequence's blocks in logical order, as wide as the longest needs."""
        width = -(-int(self._after.max(initial=0)) // self.block_size)
        return self._to_device(self._tables.entries[self._slots, :width])

    @cached_property
    def _to_write(self) -> NDArray[np.bool_]:
        """`[T]`: whether a new token's K and V are not in its block yet."""
        positions = self._token_positions[0]
        return positions >= np.repeat(self._stored, self._new)

    @cached_property
    def _write_index(self) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Rows of the batch to write (None: all), and the block and offset of each."""
        _, blocks, offsets = self._token_positions
        if self._to_write.all():
            return None, self._to_device(blocks), self._to_device(offsets)
        rows = np.flatnonzero(self._to_write)
        return self._to_device(rows), self._to_device(blocks[rows]), self._to_device(offsets[rows])

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Scatter the step's K and V `[T, kv_heads, head_dim]` of one layer into the blocks."""
        rows, blocks, offsets = self._write_index
        if rows is not None:
            k, v = k[rows], v[rows]
        self.storage.write(self._place(layer), blocks, offsets, k, v)

    def keys(self, layer: int) -> torch.Tensor:
        """K of all blocks as it is stored, `[blocks, kv_heads, block_size, head_dim]`; no copy. In int4 the last
        dimension is the bytes of a head.
        """
        return self.storage.keys[self._place(layer)]

    def values(self, layer: int) -> torch.Tensor:
        """The same of V."""
        return self.storage.values[self._place(layer)]

    def key_scales(self, layer: int) -> torch.Tensor | None:
        """What each row of K in int8 or fp8 is to be multiplied by, `[blocks, kv_heads, block_size]`; else None."""
        scales = self.storage.key_scales
        return None if scales is None else scales[self._place(layer)]

    def value_scales(self, layer: int) -> torch.Tensor | None:
        """The same of V."""
        scales = self.storage.value_scales
        return None if scales is None else scales[self._place(layer)]

    def read(self, layer: int, block: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a block's first tokens, `[kv_heads, tokens, head_dim]`; no copy, except of int8 as float32."""
        return self.storage.read(self._place(layer), block, tokens)

    def blocks(self, sequence: int) -> list[int]:
        """Block ids that hold a sequence's tokens, in logical order; `sequence` counts within the view. 0 for those
        that lie behind the layers' window.
        """
        count = -(-self.lengths[sequence] // self.block_size)
        ids: list[int] = self._tables.entries[self._slots[sequence], :count].tolist()
        return ids

    def repeated_tokens(self) -> int:
        """Tokens in blocks that several sequences share, the first of which is not counted."""
        counts = -(-self._after // self.block_size)
        table = self._tables.entries[self._slots, : int(counts.max(initial=0))]
        entries = np.arange(table.shape[1])
        ids = table[(entries < counts[:, None]) & (entries >= self._tables.first[self._slots, None])]
        return (len(ids) - len(np.unique(ids))) * self.block_size

    def gather(self, layer: int, sequence: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one sequence's tokens from position `first` on, in order, `[kv_heads, length - first,
        head_dim]`, this step's tokens included.

        One block is sliced without a copy; several are copied into buffers that the next call reuses. What is
        not stored as floating point numbers of its own comes as float32, always copied.
        """
        length, entry = self.lengths[sequence], first // self.block_size
        first -= entry * self.block_size
        length -= entry * self.block_size
        if length <= self.block_size:
            block = int(self._tables.entries[self._slots[sequence], entry])
            k, v = self.read(layer, block, length)
            return k[:, first:], v[:, first:]
        rows = self._gather_rows.get((sequence, entry))
        if rows is None:
            ids = np.asarray(self.blocks(sequence)[entry:], dtype=np.int64)
            heads = np.arange(self.storage.spec.num_kv_heads, dtype=np.int64)
            rows = self._to_device((ids[None, :] * len(heads) + heads[:, None]).reshape(-1))
            self._gather_rows[sequence, entry] = rows
        k, v = self.storage.gather(self._place(layer), rows)
        return k[:, first:length], v[:, first:length]

    def alone(self, sequence: int) -> CacheView:
        """What a pass over one sequence sees. Only the whole view is advanced or rolled back."""
        one = slice(sequence, sequence + 1)
        part = CacheView(
            self._tables,
            self._storage,
            self._slots[one],
            self._new[one],
            on_advance=self._on_advance,
            on_rollback=self._on_rollback,
            others=[group._tables for group in self._others],
        )
        part._open = False
        return part

    def plain(self) -> PlainView:
        """See PlainView."""
        width = -(-int(self._after.max(initial=0)) // self.block_size)
        return PlainView(self._new, tuple(group._tables.take(self._slots, width) for group in self.groups))

    def advance(self, kept: NDArray[np.int64] | None = None) -> None:
        """Make the step's tokens part of the sequences: of each slot the first `kept`, `[B]`; None: all. The others
        are forgotten, and blocks that only they are in are given back. Call once, after the forward pass.

        Raises SlotError where more is to be forgotten than was proposed.
        """
        self._check_open()
        self._on_advance(self._slots, self._new, kept)
        self._open = False

    def rollback(self) -> None:
        """Forget the step: the sequences are as long as before, what it wrote is beyond their end, and the blocks
        it would have filled are not shared.
        """
        self._check_open()
        self._open = False
        self._on_rollback(self._slots)

    def _place(self, layer: int) -> int:
        """Which of a block's layers it is."""
        return self._places[layer][1] if self._places else layer

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError("this view was already advanced or rolled back")

    def _to_device(self, array: NDArray[np.int64] | NDArray[np.int32]) -> torch.Tensor:
        import torch

        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        # The array may go at once: CUDA returns from copying pageable memory when it has been read.
        return tensor.to(self.device, non_blocking=True)
