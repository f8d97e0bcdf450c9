"""Engines over the tiny decoder, requests for them, and what steps them to their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvlab.config import SchedulerConfig
from kvlab.core import FinishReason, Request, SamplingParams, Sequence, StepOutput, StepRecord
from kvlab.engine.clock import Clock, LogicalClock
from kvlab.engine.core import EngineCore
from kvlab.engine.executors.torch import TorchExecutor
from kvlab.engine.sampler import Sampler
from kvlab.engine.scheduler import build_scheduler
from kvlab.engine.step import Executor, SamplingBatch
from kvlab.engine.text import Detokenizer
from kvlab.kv.pool import BlockPool
from tests.support.model import prompt_for, tiny_decoder
from tests.support.pools import paged_pool


class Stream:
    """What a request's sink was given."""

    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []

    def __call__(self, output: StepOutput) -> None:
        self.outputs.append(output)

    @property
    def tokens(self) -> list[int]:
        return [output.token_id for output in self.outputs if output.token_id is not None]

    @property
    def ends(self) -> list[FinishReason]:
        return [output.finish_reason for output in self.outputs if output.finish_reason is not None]


class Aborting:
    """An output callback that aborts a request."""

    def __init__(self, engine: EngineCore, request_id: str) -> None:
        self.engine, self.request_id = engine, request_id

    def __call__(self, output: StepOutput) -> None:
        self.engine.abort(self.request_id)


def sampling_batch(*sequences: Sequence) -> SamplingBatch:
    """What the sampler is given for these sequences."""
    return SamplingBatch(
        tuple(sequence.spec for sequence in sequences),
        np.asarray([sequence.num_output_tokens for sequence in sequences], dtype=np.int64),
        {row: tuple(sequence.token_ids) for row, sequence in enumerate(sequences)},
    )


def make_engine(
    pool: BlockPool | None = None,
    executor: Executor | None = None,
    clock: Clock | None = None,
    eos: tuple[int, ...] = (),
    detokenize: Detokenizer | None = None,
    vocab_size: int | None = None,
    **scheduler: Any,
) -> EngineCore:
    """An engine over the tiny decoder; `scheduler` are fields of SchedulerConfig."""
    pool = paged_pool() if pool is None else pool
    config = SchedulerConfig(**({"max_batch_size": 8, "max_batched_tokens": 64} | scheduler))
    return EngineCore(
        pool,
        build_scheduler(config),
        executor or TorchExecutor(tiny_decoder(), Sampler()),
        clock or LogicalClock(),
        eos_token_ids=eos,
        vocab_size=vocab_size,
        detokenize=detokenize,
    )


def request(
    name: str,
    prompt_len: int,
    max_tokens: int,
    *,
    prompt_of: str | None = None,
    arrival_s: float = 0.0,
    **sampling: Any,
) -> Request:
    """A request whose prompt depends on its name, or on another; `sampling` are fields of SamplingParams."""
    ids = prompt_for(prompt_of or name, prompt_len)
    return Request(name, ids, SamplingParams(max_tokens, **sampling), arrival_s)


def steps(engine: EngineCore, limit: int = 2000) -> Iterator[StepRecord | None]:
    """Step until nothing is left, auditing the pool after each; fails rather than step for ever."""
    for _ in range(limit):
        if not engine.has_work():
            return
        record = engine.step()
        assert engine.pool.audit() == []
        yield record
    raise AssertionError(f"the engine still has work after {limit} steps")


def step_until(engine: EngineCore, condition: Callable[[], bool]) -> None:
    for _ in steps(engine):
        if condition():
            return
    raise AssertionError("the engine came to its end before that")


def drain(engine: EngineCore) -> list[StepRecord]:
    """All steps until nothing is left; the pool is then empty."""
    records = [record for record in steps(engine) if record is not None]
    assert_empty(engine)
    return records


def run(engine: EngineCore, *requests: Request) -> list[Sequence]:
    sequences = [engine.add_request(each) for each in requests]
    drain(engine)
    return sequences


def assert_empty(engine: EngineCore) -> None:
    stats = engine.pool.stats()
    assert (stats.blocks_in_use, stats.sequences, stats.tokens_stored) == (0, 0, 0)
    assert engine.pool.counters().blocks_allocated == engine.pool.counters().blocks_freed
    assert engine.pool.audit() == []
