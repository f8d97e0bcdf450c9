"""How many blocks a pool gets from a count, a byte budget, or neither."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.config import KVConfig, format_bytes, parse_bytes
from kvlab.errors import CapacityError
from kvlab.kv.pools import POOLS
from kvlab.kv.spec import KVSpec


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Blocks of a pool, and what they hold and cost."""

    num_blocks: int
    block_size: int
    bytes_per_token: int

    @property
    def token_slots(self) -> int:
        """Token slots of the pool."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V."""
        return self.token_slots * self.bytes_per_token


def size_pool(kv: KVConfig, spec: KVSpec, *, max_batch_size: int, max_seq_len: int) -> PoolSize:
    """The whole blocks that the configured bytes hold; the same bytes for either backend.

    With neither `num_blocks` nor `memory`, the bytes that `max_batch_size` contiguous slots of
    `max_seq_len` tokens take. Raises CapacityError, saying what would fit, where not one block fits.
    """
    if kv.num_blocks is not None:
        setting, tokens = f"kv.num_blocks={kv.num_blocks}", kv.num_blocks * kv.block_size
    elif kv.memory is not None:
        setting = f"kv.memory={kv.memory}"
        tokens = parse_bytes(kv.memory, key="kv.memory") // spec.bytes_per_token
    else:
        setting = f"scheduler.max_batch_size={max_batch_size}"
        tokens = max_batch_size * max_seq_len
    pool = POOLS.get(kv.backend)
    block_size = pool.block_size_for(kv, max_seq_len)
    if tokens < block_size:
        advice = f"kv.memory={-(-block_size * spec.bytes_per_token // 1024)}KiB"
        if kv.num_blocks is not None:
            advice = f"kv.num_blocks={-(-block_size // kv.block_size)}"
        raise CapacityError(
            f"{setting} holds {tokens} tokens at {format_bytes(spec.bytes_per_token)} each, less than "
            f"one {pool.unit} of {block_size}; "
            f"{advice} would hold one"
        )
    return PoolSize(tokens // block_size, block_size, spec.bytes_per_token)


def check_longest_sequence(size: PoolSize, longest: int) -> None:
    """Raise CapacityError unless the pool can hold a sequence of `longest` tokens, saying what would."""
    if longest > size.token_slots:
        blocks = -(-longest // size.block_size)
        needed = blocks * size.block_size * size.bytes_per_token
        raise CapacityError(
            f"the KV pool of {size.num_blocks} blocks of {size.block_size} tokens ({size.token_slots} tokens, "
            f"{format_bytes(size.num_bytes)}) is too small for one sequence of {longest} tokens, which needs "
            f"{blocks} blocks; kv.num_blocks={blocks}, or instead kv.memory={-(-needed // 1024)}KiB, would fit it"
        )
