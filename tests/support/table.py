"""A model that is a table: the next token is a checksum of all tokens before it, read back from memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvlab.config import FaultsConfig, SchedulerConfig
from kvlab.core import Request
from kvlab.engine.clock import Clock, LogicalClock
from kvlab.engine.core import EngineCore
from kvlab.engine.faults import FaultyExecutor
from kvlab.engine.scheduler import build_scheduler
from kvlab.engine.speculation import PROPOSERS, Proposer
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.spec import KVSpec
from kvlab.kv.view import CacheView
from tests.support.executors import Pass, took_part
from tests.support.pools import contiguous, paged
from tests.support.tiers import SlowStore, tiered_pool

VOCAB = 1_000_000  # whole numbers that float32 holds
SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")


class TableExecutor:
    """Stores each token's id as K and its position as V where the view says, then reads every sequence that samples
    back through its table. What memory lost or mixed up shows in `errors` and in the tokens.

    A pass takes `step_s` and `token_s` for each token, on a LogicalClock.
    """

    def __init__(self, step_s: float = 0.0, token_s: float = 0.0) -> None:
        self._step_s, self._token_s = step_s, token_s
        self._computed: dict[tuple[str, int], dict[int, int]] = {}  # tokens of each sequence by their positions
        self.errors: list[str] = []
        self.steps: list[Pass] = []

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        """See Executor."""
        self.steps.append(took_part(step))
        keys, values = (tensor.numpy()[0, :, 0, :, 0] for tensor in (view.storage.keys, view.storage.values))
        slots = view.slot_mapping.numpy()
        write = slots >= 0
        keys.reshape(-1)[slots[write]] = step.token_ids[write]
        values.reshape(-1)[slots[write]] = view.positions.numpy()[write]
        self._remember(step, view)
        tokens = []
        proposed = [0] * len(step.sequences) if step.proposed is None else step.proposed.tolist()
        for row in step.sampled.tolist():
            name, index = step.sequences[row].request_id, step.sequences[row].index
            blocks, length = view.blocks(row), view.lengths[row]
            stored = keys[blocks].reshape(-1)[:length].astype(np.int32)
            known = self._computed[name, index].items()  # and tokens that were proposed in vain, beyond its end
            if any(stored[position] != token for position, token in known if position < length):
                self.errors.append(f"{name}: its blocks hold other tokens than its own")
            if values[blocks].reshape(-1)[:length].tolist() != list(range(length)):
                self.errors.append(f"{name}: its tokens are not at their positions")
            tokens += [checksum(stored[:end], index) for end in range(length - proposed[row], length + 1)]
        return StepResult(tokens, elapsed_s=self._step_s + self._token_s * view.num_tokens)

    def forget(self, request_id: str) -> None:
        """Keep nothing of a request that has ended."""
        for key in [key for key in self._computed if key[0] == request_id]:
            del self._computed[key]

    def _remember(self, step: StepInput, view: CacheView) -> None:
        """Note each sequence's tokens; what it found in the cache, `undisturbed` alone can tell."""
        positions = view.positions.tolist()
        for row, sequence in enumerate(step.sequences):
            computed = self._computed.setdefault((sequence.request_id, sequence.index), {})
            batch = slice(view.starts[row], view.starts[row + 1])
            computed.update(zip(positions[batch], step.token_ids[batch].tolist(), strict=True))


def checksum(token_ids: Iterable[int], sample: int = 0) -> int:
    """The token behind these, of one of a request's samples."""
    ids = np.fromiter(token_ids, dtype=np.int32)
    return zlib.crc32(ids.tobytes(), sample) % VOCAB


class FairOracle(Proposer):
    """Knows how a request's first sample goes on, and is wrong about every third token."""

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        ids = list(token_ids)
        for _ in range(count):
            ids.append(checksum(ids) if checksum(ids, 1) % 3 else 0)
        return ids[len(token_ids) :]


@contextmanager
def oracle() -> Iterator[None]:
    """It can be chosen as scheduler.speculation.method=oracle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROPOSERS._entries, "oracle", FairOracle)
        yield


def undisturbed(request: Request, sample: int = 0) -> list[int]:
    """The tokens of a request that nothing interferes with."""
    ids = list(request.prompt_token_ids)
    for _ in range(request.sampling.max_tokens):
        ids.append(checksum(ids, sample))
    return ids[len(request.prompt_token_ids) :]


def table_pool(
    num_blocks: int, block_size: int = 4, *, max_seq_len: int = 256, **settings: Any
) -> PagedKVCachePool:
    return paged(num_blocks, block_size, max_seq_len, spec=SPEC, **settings)


def table_tiers(num_blocks: int, host_pages: int, slow_pages: int, *, max_seq_len: int = 256) -> PagedKVCachePool:
    """Blocks of 4 tokens, and two tiers behind them."""
    return tiered_pool(
        num_blocks, host_pages, SlowStore(), slow_pages=slow_pages, spec=SPEC, max_seq_len=max_seq_len
    )


def table_slots(num_slots: int, max_seq_len: int = 256) -> ContiguousKVCachePool:
    return contiguous(num_slots, max_seq_len, spec=SPEC)


def table_engine(
    pool: BlockPool,
    executor: Executor | None = None,
    clock: Clock | None = None,
    faults: FaultsConfig | None = None,
    **scheduler: Any,
) -> EngineCore:
    """An engine over the table; `scheduler` are fields of SchedulerConfig."""
    config = SchedulerConfig(**({"max_batch_size": 8, "max_batched_tokens": 64} | scheduler))
    executor = executor or TableExecutor()
    if faults is not None:
        executor = FaultyExecutor(executor, faults)
    built = build_scheduler(config, shares_prefixes=pool.shares_prefixes)
    return EngineCore(pool, built, executor, clock or LogicalClock(), vocab_size=VOCAB)
