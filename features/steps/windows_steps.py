"""Layers with sliding windows: what their groups hold, and what a model says beyond them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pytest_bdd import given, parsers, then, when

from kvlab.cli.compose import compose_run
from kvlab.config import KVConfig
from kvlab.core import Request, SamplingParams
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.core import EngineCore
from kvlab.errors import ConfigError
from kvlab.kv.groups import LayerGroup
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.lab.capacity import CapacityPlan, plan_capacity
from tests.support.poisoned import OUTPUT, answers, engine_of
from tests.support.transformers_models import PROMPTS, Written, write_model

#: In turn, beside a pool that shares and leaves windows.
OTHER_MEMORY: tuple[dict[str, Any], ...] = ({"prefix_sharing": False}, {"windows": False})


def number(text: str) -> int:
    return int(text.replace(",", ""))


@dataclass
class GroupedPool:
    """A pool of groups, and how many blocks of each a sequence holds."""

    pool: PagedKVCachePool
    held: list[int] = field(default_factory=list)


@given(
    parsers.parse(
        "blocks of 16 tokens, a group of layers that see all tokens, and two that see the last {window:d}"
    ),
    target_fixture="grouped",
)
def groups_of_layers(window: int) -> GroupedPool:
    groups = (LayerGroup((0,)), LayerGroup((1,), window), LayerGroup((2,), window))
    return GroupedPool(PagedKVCachePool(40, 16, 200, prefix_sharing=True, groups=groups))


@when(parsers.parse("a sequence of {tokens:d} tokens is computed"))
def sequence_is_computed(grouped: GroupedPool, tokens: int) -> None:
    pool = grouped.pool
    slot = pool.allocate_slot(token_ids=list(range(tokens)))
    for computed in (tokens - 1, 1):
        pool.view([slot], [computed]).advance()
    grouped.held = [len(group.tables.blocks(slot)) for group in pool.groups]
    assert pool.audit() == []


@then(parsers.parse("it holds {whole:d} blocks of the first group and {last:d} of each of the others: {total:d}"))
def blocks_of_each_group(grouped: GroupedPool, whole: int, last: int, total: int) -> None:
    assert grouped.held == [whole, last, last]
    assert grouped.pool.stats().blocks_in_use == total


@given(parsers.re(r'"(?P<overrides>model=[^"]*)"'), target_fixture="overrides")
def settings_of_windows(overrides: str) -> list[str]:
    return overrides.split()


def planned_capacity(overrides: list[str]) -> CapacityPlan:
    return plan_capacity(compose_run(overrides).config, device="cuda", lengths=[8192, 32768])


@when(parsers.re(r"one request grows to (?P<tokens>[\d,]+) tokens"), target_fixture="held")
def request_grows(overrides: list[str], tokens: str) -> tuple[int, int]:
    engine = build_engine(plan_engine(compose_run(overrides).config))
    # The last token of an answer is not computed, as nothing follows it.
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    engine.submit(Request("long", tuple(range(number(tokens) - 2)), sampling))
    record = None
    while engine.has_work():
        record = engine.step() or record
        if record is not None and record.context_tokens == number(tokens):
            break
    assert record is not None
    assert record.pool is not None
    assert engine.audit() == []
    return record.pool.blocks_in_use, number(tokens)


@then(
    parsers.re(r"it holds (?P<blocks>[\d,]+) blocks of (?P<size>[\d,]+) bytes, and the planner says the same"),
)
def as_the_planner_says(overrides: list[str], held: tuple[int, int], blocks: str, size: str) -> None:
    found, tokens = held
    plan = planned_capacity(overrides)
    assert plan.paged.block_size * plan.paged.bytes_per_slot == plan.as_dict()["bytes_per_block"] == number(size)
    assert found == plan.paged.blocks_of(tokens) == number(blocks)


@then(
    parsers.re(
        r"the planner has room for (?P<count>\d+) sequences of 8,192 tokens, and for (?P<kept>\d+) with "
        r'"(?P<override>[^"]*)"'
    )
)
def room_for_sequences(overrides: list[str], count: str, kept: str, override: str) -> None:
    rooms = [planned_capacity([*overrides, *more]).lengths[0].sequences["paged"] for more in ([], [override])]
    assert rooms == [int(count), int(kept)]
    assert rooms[0] >= 3 * rooms[1]


@dataclass
class AskedBeyondWindow:
    """A model, its own answers, and those that it gave from kvlab's memory."""

    written: Written
    expected: list[list[int]]
    given: list[list[list[int]]] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)  # tokens that each round found in the cache
    engine: EngineCore | None = None  # the latest

    def ask(self, engine: EngineCore, count: int = len(PROMPTS), tokens: int = OUTPUT) -> None:
        """Ask for the first answers once more."""
        counters = engine.pool.counters()
        self.given.append(answers(engine, count, tokens))
        self.hits.append(engine.pool.counters().hit_tokens - counters.hit_tokens)
        self.engine = engine


@given(
    parsers.parse("a small {family} that transformers wrote, and its own greedy answers beyond its window"),
    target_fixture="asked",
)
def model_with_windows(tmp_path: Path, family: str) -> AskedBeyondWindow:
    written = write_model(family, tmp_path)
    return AskedBeyondWindow(written, [written.greedy(prompt, OUTPUT) for prompt in PROMPTS])


@when("they are asked for in turn: cold, warm, without sharing, and with every token kept")
def asked_four_times(asked: AskedBeyondWindow) -> None:
    memory = KVConfig(block_size=4, num_blocks=200)
    engine = engine_of(asked.written, memory)
    for each in (engine, engine, *(engine_of(asked.written, replace(memory, **kv)) for kv in OTHER_MEMORY)):
        asked.ask(each)


@when(
    parsers.parse(
        "{count:d} answers of {tokens:d} tokens are asked for twice of {blocks:d} blocks, which are overwritten "
        "when they are free"
    )
)
def asked_under_pressure(
    asked: AskedBeyondWindow, request: pytest.FixtureRequest, count: int, tokens: int, blocks: int
) -> None:
    every = "backend_name" in request.fixturenames
    backend = request.getfixturevalue("backend_name") if every else "auto"
    limits = {"max_batch_size": 6, "admission_reserve": 0.0, "watermark": 0.0, "max_batched_tokens": 20}
    engine = engine_of(asked.written, KVConfig(block_size=4, num_blocks=blocks), backend, **limits)
    asked.expected = [answer[:tokens] for answer in asked.expected[:count]]
    for _ in range(2):
        asked.ask(engine, count, tokens)


@then(parsers.parse("all {count:d} times the answers are transformers' own"))
def all_answers_of_transformers(asked: AskedBeyondWindow, count: int) -> None:
    assert asked.given == [asked.expected] * count


@then("the warm run found more than 100 tokens")
def warm_run_found(asked: AskedBeyondWindow) -> None:
    assert asked.hits[1] > 100


@then("sequences were preempted, blocks evicted, and prefixes found")
def was_under_pressure(asked: AskedBeyondWindow) -> None:
    assert asked.engine is not None
    assert asked.engine.stats().preemptions
    assert asked.engine.pool.counters().evicted_blocks
    assert asked.hits[1]


@then(parsers.re(r'the engine is refused with "(?P<sentence>[^"]*)"'))
def refused_with(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        plan_engine(compose_run(overrides).config)
    assert str(refusal.value) == sentence


@then(parsers.parse('with "{override}" it is not refused so'))
def not_refused_so(overrides: list[str], override: str) -> None:
    plan_engine(compose_run([*overrides, override]).config)
