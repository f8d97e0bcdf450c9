"""A tiny decoder, engines over it, and what its requests should get."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from kvlab.attention.registry import default_registry
from kvlab.config import SchedulerConfig
from kvlab.core import FinishReason, Request, SamplingParams, Sequence, StepOutput, StepRecord
from kvlab.engine.clock import Clock, LogicalClock
from kvlab.engine.engine import Engine
from kvlab.engine.executors.torch import TorchExecutor
from kvlab.engine.sampler import Sampler
from kvlab.engine.scheduler import build_scheduler
from kvlab.engine.step import Executor, SamplingBatch, StepInput, StepResult
from kvlab.engine.text import Detokenizer
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView
from kvlab.models.config import DecoderConfig
from kvlab.models.decoder import Decoder, attention_specs
from kvlab.models.families import read_config
from kvlab.models.weights import DummyWeights

VOCAB = 200
BLOCK_SIZE, NUM_BLOCKS, MAX_SEQ_LEN = 4, 24, 96


class LoudWeights(DummyWeights):
    """Dummy weights half as large again: greedy tokens of a tiny model then depend on all tokens before them."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        weight = super().take(name, shape)
        return weight if len(shape) == 1 else weight * 1.5


@cache
def tiny_config() -> DecoderConfig:
    return read_config(
        {
            "model_type": "qwen3",
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
        }
    )


@cache
def tiny_decoder() -> Decoder:
    """Holds no state between calls, so that all tests share it."""
    config = tiny_config()
    specs = attention_specs(config, "float32", "cpu")
    return Decoder(config, LoudWeights(torch.float32, "cpu"), default_registry().select(specs), specs, 512)


def paged_pool(num_blocks: int = NUM_BLOCKS) -> PagedKVCachePool:
    storage = KVStorage(tiny_config().kv_spec("float32"), num_blocks, BLOCK_SIZE)
    return PagedKVCachePool(num_blocks, BLOCK_SIZE, MAX_SEQ_LEN, storage)


def sharing_pool(num_blocks: int = NUM_BLOCKS) -> PagedKVCachePool:
    storage = KVStorage(tiny_config().kv_spec("float32"), num_blocks, BLOCK_SIZE)
    return PagedKVCachePool(num_blocks, BLOCK_SIZE, MAX_SEQ_LEN, storage, prefix_sharing=True)


def slotted_pool(num_slots: int = 4) -> ContiguousKVCachePool:
    storage = KVStorage(tiny_config().kv_spec("float32"), num_slots, MAX_SEQ_LEN)
    return ContiguousKVCachePool(num_slots, MAX_SEQ_LEN, storage)


class RecordingExecutor(TorchExecutor):
    """Remembers who took part in each step, with how many tokens."""

    def __init__(self) -> None:
        super().__init__(tiny_decoder(), Sampler())
        self.steps: list[dict[str, int]] = []
        self.sampled: list[int] = []  # tokens that each step returned

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        names = [sequence.request_id for sequence in step.sequences]
        self.steps.append(dict(zip(names, step.num_tokens.tolist(), strict=True)))
        result = super().execute(step, view)
        self.sampled.append(len(result.token_ids))
        return result

    def first_step_of(self, request_id: str) -> int:
        return next(index for index, step in enumerate(self.steps) if request_id in step)


class SteadyExecutor(RecordingExecutor):
    """Each pass takes a second of a LogicalClock."""

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        return replace(super().execute(step, view), elapsed_s=1.0)


class FailingExecutor(RecordingExecutor):
    """Fails in each step that `victim` takes part in, once the model has written its K and V."""

    def __init__(self, victim: str) -> None:
        super().__init__()
        self.victim: str | None = victim
        self.view: CacheView | None = None  # that of the last step

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        self.view = view
        result = super().execute(step, view)
        if self.victim in self.steps[-1]:
            raise ArithmeticError("the device fell over")
        return result


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

    def __init__(self, engine: Engine, request_id: str) -> None:
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
) -> Engine:
    """An engine over the tiny decoder; `scheduler` are fields of SchedulerConfig."""
    pool = paged_pool() if pool is None else pool
    config = SchedulerConfig(**({"max_batch_size": 8, "max_batched_tokens": 64} | scheduler))
    return Engine(
        pool,
        build_scheduler(config),
        executor or TorchExecutor(tiny_decoder(), Sampler()),
        clock or LogicalClock(),
        eos_token_ids=eos,
        vocab_size=vocab_size,
        detokenize=detokenize,
    )


def prompt_for(name: str, length: int) -> tuple[int, ...]:
    return tuple(random.Random(name).choices(range(VOCAB), k=length))


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


def steps(engine: Engine, limit: int = 2000) -> Iterator[StepRecord | None]:
    """Step until nothing is left, auditing the pool after each; fails rather than step for ever."""
    for _ in range(limit):
        if not engine.has_work():
            return
        record = engine.step()
        assert engine.pool.audit() == []
        yield record
    raise AssertionError(f"the engine still has work after {limit} steps")


def step_until(engine: Engine, condition: Callable[[], bool]) -> None:
    for _ in steps(engine):
        if condition():
            return
    raise AssertionError("the engine came to its end before that")


def drain(engine: Engine) -> list[StepRecord]:
    """All steps until nothing is left; the pool is then empty."""
    records = [record for record in steps(engine) if record is not None]
    assert_empty(engine)
    return records


def run(engine: Engine, *requests: Request) -> list[Sequence]:
    sequences = [engine.add_request(each) for each in requests]
    drain(engine)
    return sequences


def assert_empty(engine: Engine) -> None:
    stats = engine.pool.stats()
    assert (stats.blocks_in_use, stats.sequences, stats.tokens_stored) == (0, 0, 0)
    assert engine.pool.counters().blocks_allocated == engine.pool.counters().blocks_freed
    assert engine.pool.audit() == []


def expected_tokens(asked: Request) -> list[int]:
    """Greedy tokens by the book: for each, the whole sequence through the model again, into an empty cache."""
    return list(_greedy(asked.prompt_token_ids, asked.sampling.max_tokens))


@cache
def _greedy(prompt_ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    if count == 0:
        return ()
    before = _greedy(prompt_ids, count - 1)
    ids = prompt_ids + before
    pool = ContiguousKVCachePool(1, len(ids), KVStorage(tiny_config().kv_spec("float32"), 1, len(ids)))
    view = pool.view([pool.allocate_slot(len(ids))], [len(ids)])
    logits = tiny_decoder().forward(torch.tensor(ids), view, torch.tensor([len(ids) - 1]))
    return (*before, int(logits.argmax()))
