"""Runs of steps at once: where nothing changes from step to step but lengths, only what changes is computed.

A simulated step costs no more than its bookkeeping. Most of that is the same in each of hundreds of steps in which
the same sequences decode, so that it is done once for all of them. Every record, every block's history and every
token is that of the steps one by one, which decide whenever there is something to decide.
"""

import math
from functools import cache
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvlab.core import PoolCounters, Sequence, SequenceSpec, attended_pairs
from kvlab.core.step_log import StepLog
from kvlab.engine.step import Executor
from kvlab.engine.step_plan import Chunk, DecodeBatch, slots_of
from kvlab.kv.journal import BlockJournal
from kvlab.kv.pool import BlockPool

_MOST = 512  # steps at once
_FIRST = 8  # steps that are planned before it is known how many begin in time, twice as many each time after


@runtime_checkable
class RunExecutor(Protocol):
    """An executor that knows the results of steps ahead."""

    def run(
        self,
        specs: tuple[SequenceSpec, ...],
        num_outputs: NDArray[np.int64],
        new_tokens: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], list[float]] | None:
        """Of steps that compute `new_tokens` [B] each, of sequences of `lengths` [steps, B] with them, the tokens
        `[steps, D]` of the first D sequences, `specs` and `num_outputs` of which are given, and seconds; None: it
        cannot know.
        """


def knows_ahead(executor: Executor) -> TypeGuard[RunExecutor]:
    """Whether it is a RunExecutor."""
    return _know_ahead(type(executor))


@cache  # asked before every run, of which there are thousands
def _know_ahead(executors: type[Executor]) -> bool:
    return issubclass(executors, RunExecutor)


def stays_out(pool: BlockPool, decoding: DecodeBatch, refused: Sequence) -> bool:
    """Whether a sequence for which there is no memory surely finds none as long as these decode and nothing else
    happens: free blocks become fewer then, unless a block that is filled equals another, and gives its place back,
    or goes on with what is cached of the sequence's tokens, which could share it.
    """
    if pool.offload.tiers:
        return False
    tokens = refused.token_ids
    hits = pool.prefix_tokens(tokens, refused.request.salt) // pool.block_size
    hits = hits if hits < len(tokens) // pool.block_size else -1  # else there are no more to be found
    return all(group.sharing.fills_apart(decoding.slots.tolist(), hits) for group in pool.groups)


class StepRun:
    """Steps that are all alike: `decoding`, and a `chunk` of a prompt, of which each step takes the next, until one
    could take the `rest`. The last may give sequences their last tokens.
    """

    def __init__(self, pool: BlockPool, decoding: DecodeBatch, chunk: Chunk | None, rest: int) -> None:
        self._pool, self._decoding, self._chunk = pool, decoding, chunk
        slots, most = decoding.slots, min(decoding.steps_left, _MOST)
        self._new = np.ones(len(decoding), dtype=np.int64)
        part = None
        if chunk is not None:
            part = slots_of([chunk.sequence])[0], chunk.num_tokens
            slots, self._new = np.append(slots, part[0]), np.append(self._new, part[1])
            most = min(most, -((rest - chunk.sequence.num_uncomputed) // chunk.num_tokens))
        self._blocks = pool.run(decoding.slots, part)
        most = self._blocks.most(max(most, 0))
        self._lengths = pool.tables.lengths[slots] + self._new * np.arange(1, most + 1)[:, None]
        self._tokens: list[NDArray[np.int64]] = []  # [steps, D], of so many steps each time
        self._times: list[float] = []
        self.ended: list[tuple[Sequence, int]] = []  # after `take`: who got the last token, and which

    @property
    def end_s(self) -> float:
        """When the last step ends."""
        return self._times[-1]

    def plan(self, executor: RunExecutor, now: float, until_s: float) -> bool:
        """Find out what the steps bring that begin before `until_s`. Whether there are any."""
        decoding, times = self._decoding, [now]
        while (planned := len(times) - 1) < len(self._lengths) and times[-1] < until_s:
            is_bounded = until_s < math.inf or decoding.may_stop
            lengths = self._lengths[planned:][: max(_FIRST, planned) if is_bounded else None]
            result = executor.run(decoding.specs, decoding.num_outputs + planned, self._new, lengths)
            if result is None:
                return False
            tokens, seconds = result
            self._tokens.append(tokens)
            steps = decoding.steps_to_stop(tokens)
            for step_s in seconds[:steps]:
                if not times[-1] < until_s:
                    break
                times.append(times[-1] + step_s)
            if steps is not None:
                break
        self._times = times
        return len(times) > 1

    def take(
        self,
        journal: BlockJournal | None,
        before: PoolCounters,
        *,
        index: int,
        running: int,
        waiting: int,
        replica: int = 0,
    ) -> StepLog:
        """Take the steps that were planned: give sequences their tokens, bring blocks forward, note each step.

        `before` is what had been done when the first step began, `index` its number; `running` and `waiting` are
        numbers of sequences, `replica` that of the engine.
        """
        pool, decoding, times = self._pool, len(self._decoding), self._times
        steps = len(times) - 1
        tokens, sequences = np.concatenate(self._tokens)[:steps], self._decoding.sequences
        rows = self._decoding.extend(tokens, times[1:])
        self.ended = [(sequences[row], int(tokens[-1, row])) for row in rows]
        chunk, count = (None, 0) if self._chunk is None else self._chunk
        lengths, log = self._lengths[:steps], pool.allocator.content_log
        pools, stored, recomputed = [], [], []
        for step in range(steps):
            if step and log is not None:
                log.next_step()
            expired = pool.expire(times[step])
            if self._blocks.step() or expired or not step:  # before the first, ended ones gave back their blocks
                now = pool.counters()
                pools.append((step, pool.stats(), now - before))
                before = now
            stored.append(pool.tokens_stored)
            recomputed.append(0 if chunk is None else chunk.advance(count))
            if journal is not None:
                journal.end_step()
        self._blocks.finish()
        columns: dict[str, ArrayLike] = {
            "index": np.arange(index, index + steps),
            "start_s": times[:-1],
            "end_s": times[1:],
            "running": running,
            "waiting": waiting,
            "batch_seqs": len(self._new),
            "prefill_tokens": count,
            "decode_tokens": decoding,
            "recomputed_tokens": recomputed,
            "execute_ms": np.diff(times) * 1000,
            "sampled_tokens": decoding,
            "context_tokens": lengths.sum(axis=1),
            "attended_tokens": attended_pairs(self._new, lengths).sum(axis=1),
            "replica": replica,
            "pool.tokens_stored": stored,
        }
        return StepLog.of_columns(pools, columns, steps)
