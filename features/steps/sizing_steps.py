"""A server that starts from its configuration, or says why it does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
from pytest_bdd import given, parsers, then, when

from features.steps.checkpoints import ARCHITECTURES
from features.steps.support import Memory
from kvlab.config import (
    ExecutorConfig,
    KVConfig,
    LengthConfig,
    ModelConfig,
    RunConfig,
    SchedulerConfig,
    WorkloadConfig,
)
from kvlab.core import FinishReason, Request
from kvlab.engine.build import build_engine
from kvlab.engine.core import EngineCore
from kvlab.errors import KvlabError
from kvlab.kv.pool import BlockPool
from kvlab.lab.run.plan import plan_run


@dataclass
class Setup:
    """What the scenario configures, before the server starts."""

    kv: dict[str, Any]
    max_seq_len: int = 64
    request_tokens: int = 10


@dataclass
class Attempt:
    """A start that gave an engine, or a refusal."""

    engine: EngineCore | None = None
    requests: list[Request] = field(default_factory=list)
    refusal: str = ""


def kv_settings(text: str) -> dict[str, Any]:
    """Read `kv.memory=1MiB, kv.block_size=32`."""
    settings = dict(re.findall(r"kv\.(\w+)=([^\s,]+)", text))
    kinds: dict[str, Callable[[str], Any]] = {"num_blocks": int, "block_size": int, "prefix_sharing": "true".__eq__}
    kinds |= dict.fromkeys(("pinned_share", "pin_ttl_s", "ttl_s", "quota"), float)
    return {key: kinds.get(key, str)(value) for key, value in settings.items()}


@given(parsers.parse("a server configured with {settings}"), target_fixture="setup")
def configured(settings: str) -> Setup:
    return Setup(kv_settings(settings))


@given(parsers.parse("sequences of up to {tokens:d} tokens"))
def longest_sequence(setup: Setup, tokens: int) -> None:
    setup.max_seq_len = tokens


@given(parsers.parse("a workload with a request of {tokens:d} tokens"))
def a_workload(setup: Setup, tokens: int) -> None:
    setup.request_tokens = tokens


@when("the server starts", target_fixture="attempt")
def starts(setup: Setup, scheduling: SchedulerConfig) -> Attempt:
    """Plan and build, as every run does; the weights are random."""
    try:
        plan = plan_run(_configuration(setup, scheduling))
        return Attempt(build_engine(plan), plan.requests)
    except KvlabError as error:
        return Attempt(refusal=str(error))


@when(parsers.parse("the server starts with {settings} instead"), target_fixture="attempt")
def starts_with(setup: Setup, scheduling: SchedulerConfig, settings: str) -> Attempt:
    kept = {key: value for key, value in setup.kv.items() if key not in ("memory", "num_blocks")}
    return starts(replace(setup, kv=kept | kv_settings(settings)), scheduling)


def _configuration(setup: Setup, scheduling: SchedulerConfig) -> RunConfig:
    family, architecture = ARCHITECTURES["qwen3"]
    prompt = LengthConfig(setup.request_tokens - 2, setup.request_tokens - 2)
    kv = KVConfig(**setup.kv)
    return RunConfig(
        model=ModelConfig("tiny", family, architecture, max_seq_len=setup.max_seq_len),
        kv=kv,
        scheduler=replace(scheduling, max_batched_tokens=max(scheduling.max_batched_tokens, kv.block_size)),
        executor=ExecutorConfig(device="cpu", dtype="float32"),
        workload=WorkloadConfig("one", num_requests=1, prompt_len=prompt, output_len=LengthConfig(2, 2)),
    )


@then(parsers.parse("its pool has {count:d} blocks of {tokens:d} tokens"), target_fixture="memory")
def pool_has(attempt: Attempt, count: int, tokens: int) -> Memory:
    assert attempt.refusal == ""
    assert attempt.engine is not None
    assert isinstance(attempt.engine.pool, BlockPool)
    memory = Memory(attempt.engine.pool)
    stats = memory.pool.stats()
    assert (stats.blocks_total, stats.block_size) == (count, tokens)
    assert len(memory.free_blocks()) == memory.pool.free_slot_count() == count
    return memory


@then(parsers.parse("K and V take {size:d} bytes"))
def bytes_taken(memory: Memory, size: int) -> None:
    assert memory.storage.keys.nbytes + memory.storage.values.nbytes == size


@then(parsers.parse('it refuses, saying "{reason}"'))
def refuses(attempt: Attempt, reason: str) -> None:
    assert attempt.engine is None
    assert reason in attempt.refusal


@then(parsers.parse('it suggests "{suggestion}"'))
def suggests(attempt: Attempt, suggestion: str) -> None:
    assert re.search(re.escape(suggestion) + r"\b", attempt.refusal)


@then("it suggests an amount of memory that the machine has")
def suggests_memory(attempt: Attempt, setup: Setup, scheduling: SchedulerConfig) -> None:
    match = re.search(r"kv\.memory=(\d+)MiB would fit", attempt.refusal)
    assert match, attempt.refusal
    assert 0 < int(match[1]) * 2**20 < psutil.virtual_memory().total
    # Others use this machine too: what was free may not be any more, so half of it is tried.
    plan_run(_configuration(replace(setup, kv={**setup.kv, "memory": f"{int(match[1]) // 2}MiB"}), scheduling))


@then("it serves the workload")
def serves(attempt: Attempt) -> None:
    assert attempt.refusal == ""
    assert attempt.engine is not None
    sequences = [attempt.engine.add_request(request) for request in attempt.requests]
    for _ in range(100):  # more than its tokens
        attempt.engine.step()
    assert sequences
    assert not attempt.engine.has_work()
    assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in sequences)
