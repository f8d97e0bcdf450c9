"""Content of layers with windows leaves the pool and comes back: each group of layers has pages of its own."""

from __future__ import annotations

import random
from functools import cache

import pytest

from kvlab.cli.compose import compose_run
from kvlab.core import Request, SamplingParams, Sequence
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.core import EngineCore
from kvlab.kv.pool import BlockPool
from kvlab.kv.tiers.host import BlockPages
from tests.engine.service_loop import wait_until
from tests.support.engines import run
from tests.support.tiers import SlowStore, poison_evicted, slow_tier, tier_of

SETTINGS = (
    "model=gemma3_tiny",  # two layers of three see 32 tokens
    "model.max_seq_len=256",
    "executor=cpu",
    "executor.dtype=float32",
    "executor.threads=1",
    "scheduler.max_batch_size=6",
    "scheduler.max_batched_tokens=64",
    "scheduler.admission_reserve=0",
    "kv.block_size=8",
)


def engine_with(*settings: str) -> EngineCore:
    engine = build_engine(plan_engine(compose_run([*SETTINGS, *settings]).config))
    if "kv.offload=1MiB" in settings:
        assert isinstance(engine.pool, BlockPool)
        poison_evicted(engine.pool)
    return engine


def traffic() -> list[Request]:
    """Prompts with common beginnings, many longer than the window."""
    chance = random.Random(3)
    prompts = [[chance.randrange(1, 200) for _ in range(120)] for _ in range(3)]
    return [
        Request(
            f"r{number}",
            (*prompts[number % 3][: chance.randint(20, 120)], *chance.choices(range(200), k=chance.randint(0, 5))),
            SamplingParams(chance.randint(1, 24), ignore_eos=True),
        )
        for number in range(18)
    ]


@cache
def undisturbed() -> list[list[int]]:
    engine = engine_with("kv.num_blocks=400", "kv.prefix_sharing=false", "kv.windows=false")
    return outputs(run(engine, *traffic()))


def outputs(sequences: list[Sequence]) -> list[list[int]]:
    return [sequence.output_token_ids for sequence in sequences]


@pytest.mark.parametrize("blocks", [34, 44])
def test_tokens_are_those_of_a_pool_that_evicts_nothing(blocks: int) -> None:
    engine = engine_with(f"kv.num_blocks={blocks}", "kv.offload=1MiB")
    assert isinstance(engine.pool, BlockPool)
    assert len(engine.pool.groups) > 1
    assert engine.pool.storage is not None
    assert BlockPages(engine.pool.storage).page_bytes == tier_of(engine).page_bytes
    half = len(traffic()) // 2
    sequences = run(engine, *traffic()[:half]) + run(engine, *traffic()[half:])
    assert outputs(sequences) == undisturbed()
    counters = engine.pool.counters()
    assert counters.host_hit_tokens
    assert counters.failed_pages == 0


def test_a_page_of_one_group_that_cannot_be_read_makes_its_sequences_begin_anew() -> None:
    engine, store = engine_with("kv.num_blocks=44", "kv.offload=1MiB"), SlowStore()
    offload = engine.pool.offload  # type: ignore[attr-defined]
    tier = slow_tier(400, tier_of(engine).page_bytes, store)
    offload.tiers, offload._room = [tier], offload._room | {tier: offload._room[offload.tiers[0]]}
    half = len(traffic()) // 2
    sequences = run(engine, *traffic()[:half])
    wait_until(lambda: len(store.pages) == len(tier))  # another thread writes
    store.broken.update(random.Random(1).sample(sorted(store.pages), len(store.pages) // 8))
    sequences += run(engine, *traffic()[half:])
    assert outputs(sequences) == undisturbed()
    counters = engine.pool.counters()
    assert counters.failed_pages
    assert counters.disk_hit_tokens
