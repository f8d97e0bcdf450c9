"""An engine whose model two processes compute: the tokens of one process, and an end to both whatever happens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache

import psutil
import pytest

from kvlab.config import KVConfig
from kvlab.confined import start_module
from kvlab.core import Request, SamplingParams, StepRecord
from kvlab.engine import ranks
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.core import EngineCore
from kvlab.engine.service import Engine
from kvlab.errors import ConfigError, EngineStoppedError
from kvlab.models.config import TransformersConfig, WeightCounts
from kvlab.planning.settings import refuse_split
from tests.support.engines import drain, request
from tests.support.model import tiny_config
from tests.support.plans import composed

PAGED = (
    "model=qwen3_tiny",
    "model.max_seq_len=128",
    "kv.num_blocks=11",
    "scheduler.max_batch_size=8",
    "scheduler.max_batched_tokens=32",
    "scheduler.admission_reserve=0",
    "scheduler.speculation.method=ngram",
)
CONTIGUOUS = ("model=llama_tiny", "model.max_seq_len=128", "kv=contiguous", "scheduler.max_batch_size=4")
REQUESTS = [
    request("chunked", 70, 20, ignore_eos=True),
    request("samples", 33, 15, prompt_of="common", n=3, temperature=2.0, seed=5),
    request("scored", 40, 12, prompt_of="common", logprobs=2, prompt_logprobs=1),
    request("penalized", 35, 14, prompt_of="common", repetition_penalty=1.3),
    *(request(f"short {number}", 10, 40, ignore_eos=True) for number in range(4)),
]


@contextmanager
def engine_of(*overrides: str, size: int = 2) -> Iterator[EngineCore]:
    chosen = (*overrides, "executor.dtype=float32", "executor.threads=1", f"executor.tensor_parallel={size}")
    engine = build_engine(plan_engine(composed(*chosen)))
    try:
        yield engine
    finally:
        engine.end_processes()


def served(engine: EngineCore) -> tuple[list[list[int]], list[float], list[StepRecord]]:
    """Tokens and log-probabilities of all samples, and the steps."""
    first = [engine.add_request(each) for each in REQUESTS]
    records = drain(engine)
    every = [each for sequence in first for each in (sequence, *sequence.siblings)]
    scores = [entry.logprob for each in every for entry in (*each.logprobs, *each.prompt_logprobs) if entry]
    return [each.output_token_ids for each in every], scores, records


@cache
def of_one_process(*overrides: str) -> tuple[list[list[int]], list[float], list[StepRecord]]:
    with engine_of(*overrides, size=1) as engine:
        return served(engine)


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "kvlab.engine.rank" in each.cmdline()]


def test_pages_chunks_preemption_shared_prefixes_samples_and_proposals() -> None:
    tokens, scores, steps = of_one_process(*PAGED)
    assert sum(step.preempted for step in steps) > 0
    assert sum(step.accepted_tokens for step in steps) > 0
    counters = [step.counters for step in steps if step.counters is not None]
    assert sum(each.hit_tokens for each in counters) > 0
    assert sum(each.cow_copies for each in counters) > 0
    with engine_of(*PAGED) as engine:
        (rank,) = children()
        found, close, others = served(engine)
        assert found == tokens
        assert close == pytest.approx(scores, abs=1e-4)
        assert [step.counters for step in others] == counters
        assert engine.pool.stats().kv_bytes == of_bytes(*PAGED)
        rank.kill()
        engine.add_request(REQUESTS[0])
        with pytest.raises(
            EngineStoppedError, match=r"executor.tensor_parallel=2: rank 1 of 2 ended \(killed by SIGKILL"
        ):
            engine.step()
    assert not rank.is_running()


def of_bytes(*overrides: str) -> int:
    return plan_engine(composed(*overrides, "executor.dtype=float32")).pool.num_bytes


def test_slots_of_contiguous_memory_and_a_rank_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LIMIT_S", 4.0)
    monkeypatch.setattr(ranks, "_LAST_WORDS_S", 0.2)
    with engine_of(*CONTIGUOUS) as core:
        (rank,) = children()
        assert served(core)[0] == of_one_process(*CONTIGUOUS)[0]
        os.kill(rank.pid, signal.SIGSTOP)
        engine = Engine(core)
        asked = Request("late", tuple(range(20)), SamplingParams(4))
        with pytest.raises(
            EngineStoppedError, match=r"stopped: executor.tensor_parallel=2: the ranks lost each other"
        ):
            list(engine.generate(asked))
        with suppress(psutil.NoSuchProcess):
            assert rank.status() == psutil.STATUS_ZOMBIE
    assert children() == []


def test_a_rank_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "start_module", lambda _, *rest: start_module("kvlab.no_such_module", *rest))
    with pytest.raises(EngineStoppedError, match=r"rank 1 of 2 ended \(exit code 1\)"), engine_of(*CONTIGUOUS):
        pass
    assert children() == []


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["kv.offload=64MiB"],
            "kv.offload=64MiB: copies the blocks of one process, and executor.tensor_parallel=2",
        ),
        (
            ["executor.threads=10000"],
            "executor.threads=10000: each of executor.tensor_parallel=2 ranks has so many",
        ),
        (["executor.tensor_parallel=4096"], "executor.tensor_parallel=4096: is more ranks than the .* cores"),
        (["model=gemma3_tiny"], "executor.tensor_parallel=2: gemma3_text has 1 KV heads"),
    ],
)
def test_what_several_ranks_cannot_do(overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plan_engine(composed("model=qwen3_tiny", "executor.tensor_parallel=2", *overrides))


def test_decoders_of_transformers() -> None:
    own = tiny_config()
    parts = {field.name: getattr(own, field.name) for field in fields(own)}
    theirs = TransformersConfig(**parts, values="{}", value_dim=own.head_dim, counts=WeightCounts(*[1] * 7))
    with pytest.raises(ConfigError, match=r"executor.tensor_parallel=2: .* transformers runs qwen3 in one process"):
        refuse_split(2, KVConfig(), theirs)
