"""A model that is a table: the next token is a checksum of all tokens before it, read back from memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvlab.config import FaultsConfig, SchedulerConfig
from kvlab.core import Request, StepPlan
from kvlab.engine.clock import Clock
from kvlab.engine.engine import Engine
from kvlab.engine.executor import Executor
from kvlab.engine.faults import FaultyExecutor
from kvlab.engine.scheduler import build_scheduler
from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView
from tests.engine.support import LogicalClock

VOCAB = 1_000_000  # whole numbers that float32 holds
_SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")


class TableExecutor:
    """Stores each token's id as K and its position as V where the view says, then reads every sequence that samples
    back through its table. What memory lost or mixed up shows in `errors` and in the tokens.
    """

    def __init__(self, clock: LogicalClock | None = None, step_s: float = 0.0, token_s: float = 0.0) -> None:
        self._clock, self._step_s, self._token_s = clock, step_s, token_s
        self.errors: list[str] = []
        self.steps: list[list[tuple[str, int]]] = []  # of each pass, who took part with how many tokens

    def execute(self, plan: StepPlan, view: CacheView) -> list[int]:
        """See Executor."""
        self.steps.append([(entry.sequence.request.request_id, entry.num_tokens) for entry in plan.scheduled])
        if self._clock is not None:
            self._clock.time += self._step_s + self._token_s * view.num_tokens
        keys, values = (tensor.numpy()[0, :, 0, :, 0] for tensor in (view.storage.keys, view.storage.values))
        ids: list[int] = []
        for sequence, count in plan.scheduled:
            ids += sequence.token_ids[sequence.num_computed : sequence.num_computed + count]
        places = view.slot_mapping.numpy()
        write = places >= 0
        keys.reshape(-1)[places[write]] = np.asarray(ids)[write]
        values.reshape(-1)[places[write]] = view.positions.numpy()[write]
        tokens = []
        for row, entry in enumerate(plan.scheduled):
            if entry.samples:
                sequence = entry.sequence
                blocks, length = view.blocks(row), view.lengths[row]
                stored = keys[blocks].reshape(-1)[:length].astype(np.int32)
                if stored.tolist() != sequence.token_ids:
                    self.errors.append(f"{sequence.request.request_id}: its blocks hold other tokens than its own")
                if values[blocks].reshape(-1)[:length].tolist() != list(range(length)):
                    self.errors.append(f"{sequence.request.request_id}: its tokens are not at their positions")
                tokens.append(checksum(stored, sequence.index))
        return tokens


def checksum(token_ids: Iterable[int], sample: int = 0) -> int:
    """The token behind these, of one of a request's samples."""
    ids = np.fromiter(token_ids, dtype=np.int32)
    return zlib.crc32(ids.tobytes(), sample) % VOCAB


def undisturbed(request: Request, sample: int = 0) -> list[int]:
    """The tokens of a request that nothing interferes with."""
    ids = list(request.prompt_token_ids)
    for _ in range(request.sampling.max_tokens):
        ids.append(checksum(ids, sample))
    return ids[len(request.prompt_token_ids) :]


def table_pool(
    num_blocks: int, block_size: int = 4, *, max_seq_len: int = 256, sharing: bool = False, eviction: str = "lru"
) -> PagedKVCachePool:
    storage = KVStorage(_SPEC, num_blocks, block_size)
    policy = EVICTION_POLICIES.get(eviction)()
    return PagedKVCachePool(num_blocks, block_size, max_seq_len, storage, prefix_sharing=sharing, eviction=policy)


def table_slots(num_slots: int, max_seq_len: int = 256) -> ContiguousKVCachePool:
    return ContiguousKVCachePool(num_slots, max_seq_len, KVStorage(_SPEC, num_slots, max_seq_len))


def table_engine(
    pool: BlockPool,
    executor: Executor | None = None,
    clock: Clock | None = None,
    faults: FaultsConfig | None = None,
    **scheduler: Any,
) -> Engine:
    """An engine over the table; `scheduler` are fields of SchedulerConfig."""
    config = SchedulerConfig(**({"max_batch_size": 8, "max_batched_tokens": 64} | scheduler))
    executor = executor or TableExecutor()
    if faults is not None:
        executor = FaultyExecutor(executor, faults)
    return Engine(pool, build_scheduler(config), executor, clock or LogicalClock(), vocab_size=VOCAB)
