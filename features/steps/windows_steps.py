"""Layers with sliding windows: what their groups hold, and what a model says beyond them."""

from __future__ import annotations

from dataclasses import dataclass, field
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
from kvlab.lab.run.drive import drive
from tests.support.transformers_models import PROMPTS, Written, engine_config, write_model

OUTPUT = 16


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
    pool.view([slot], [tokens]).advance()
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
class AskedFourTimes:
    """A model, its own answers, and those that it gave from kvlab's memory."""

    written: Written
    expected: list[list[int]]
    found: list[list[list[int]]] = field(default_factory=list)
    warm_hits: int = 0


@given(
    parsers.parse("a small {family} that transformers wrote, and its own greedy answers beyond its window"),
    target_fixture="asked",
)
def model_with_windows(tmp_path: Path, family: str) -> AskedFourTimes:
    written = write_model(family, tmp_path)
    return AskedFourTimes(written, [written.greedy(prompt, OUTPUT) for prompt in PROMPTS])


@when("they are asked for in turn: cold, warm, without sharing, and with every token kept")
def asked_four_times(asked: AskedFourTimes) -> None:
    def engine(**kv: Any) -> EngineCore:
        memory = KVConfig(block_size=4, num_blocks=200, **kv)
        limits = {"max_batched_tokens": 28, "max_batch_size": 4}
        return build_engine(plan_engine(engine_config(asked.written.directory, memory, "auto", "auto", **limits)))

    def answers(engine: EngineCore) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
        requests = [Request(f"r{index}", prompt, sampling) for index, prompt in enumerate(PROMPTS)]
        return [list(record.output_token_ids) for record in drive(engine, requests).records]

    first = engine()
    asked.found.append(answers(first))
    before = first.pool.counters().hit_tokens
    asked.found.append(answers(first))
    asked.warm_hits = first.pool.counters().hit_tokens - before
    asked.found += [answers(engine(prefix_sharing=False)), answers(engine(windows=False))]


@then("all four times the answers are transformers' own")
def all_answers_of_transformers(asked: AskedFourTimes) -> None:
    assert asked.found == [asked.expected] * 4


@then("the warm run found more than 100 tokens")
def warm_run_found(asked: AskedFourTimes) -> None:
    assert asked.warm_hits > 100


@then(parsers.re(r'the engine is refused with "(?P<sentence>[^"]*)"'))
def refused_with(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        plan_engine(compose_run(overrides).config)
    assert str(refusal.value) == sentence


@then(parsers.parse('with "{override}" it is not refused so'))
def not_refused_so(overrides: list[str], override: str) -> None:
    plan_engine(compose_run([*overrides, override]).config)
