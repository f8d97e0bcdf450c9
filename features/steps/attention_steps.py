"""Attention over the pool, by every backend, compared with plain attention over what was written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pytest_bdd import given, parsers, then, when

from features.steps.support import NAMES, SPEC, Memory, MemorySize, memory_size, names_in, plain_attention
from kvlab.attention.base import AttentionBackend, AttentionSpec
from kvlab.attention.registry import select_backend
from kvlab.errors import BackendError
from kvlab.kv.spec import KVSpec
from kvlab.kv.view import CacheView

_TYPES: dict[str, Callable[[str], object]] = {"names": names_in, "tokens": int, "times": int}
_CLOSE: Any = {"atol": 1e-5, "rtol": 1e-5}
_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


@dataclass
class Asked:
    """One sequence's part of a step: its queries, and what it got, `[layers, new tokens, heads, head_dim]`."""

    name: str
    first_position: int
    q: torch.Tensor
    out: torch.Tensor


@dataclass
class Attention:
    """A backend at work on a memory, and all it was asked in the latest `When`."""

    backend: AttentionBackend
    spec: AttentionSpec
    asked: list[Asked] = field(default_factory=list)

    def step(self, memory: Memory, growth: Mapping[str, int]) -> None:
        """Sequences grow, and their new tokens attend."""
        q = memory.random(memory.spec.num_layers, sum(growth.values()), self.spec.num_heads, self.spec.head_dim)
        first = {name: memory.length(name) for name in growth}
        results: list[torch.Tensor] = []
        memory.step(growth, lambda view: results.append(self.forward(q, view)))
        new = list(growth.values())
        for name, part, out in zip(growth, q.split(new, dim=1), results[0].split(new, dim=1), strict=True):
            self.asked.append(Asked(name, first[name], part, out))

    def alone(self, memory: Memory, asked: Asked) -> torch.Tensor:
        """The same queries over the same K and V, in a pool with nobody else in it."""
        written, first = memory.written[asked.name], asked.first_position
        last = first + asked.q.shape[1]
        twin, results = memory.twin(), []
        twin.open(asked.name)
        if first:
            twin.step({asked.name: first}, content=written[:first])
        twin.step(
            {asked.name: last - first},
            lambda view: results.append(self.forward(asked.q, view)),
            content=written[first:last],
        )
        return results[0]

    def forward(self, q: torch.Tensor, view: CacheView) -> torch.Tensor:
        """The backend over all layers."""
        outputs = [self.backend.forward(part, view, layer, self.spec) for layer, part in enumerate(q)]
        return torch.stack(outputs)

    def expected(self, memory: Memory, asked: Asked) -> torch.Tensor:
        """Plain attention over what the sequence wrote, each KV head repeated for the query heads that share it."""
        kv = memory.written[asked.name].repeat_interleave(self.spec.num_heads // self.spec.num_kv_heads, dim=3)
        layers = [
            plain_attention(
                q,
                kv[:, layer, 0],
                kv[:, layer, 1],
                asked.first_position,
                self.spec.scale,
                window=self.spec.sliding_window,
                soft_cap=self.spec.soft_cap,
            )
            for layer, q in enumerate(asked.q)
        ]
        return torch.stack(layers)


@pytest.fixture
def attention_options() -> dict[str, Any]:
    """What a scenario asks of attention besides heads and dtype."""
    return {}


@pytest.fixture
def attention(memory: Memory, backend_name: str, attention_options: dict[str, Any]) -> Attention:
    """The backend that this run of the scenario is about; skipped, with its reason, where it cannot run."""
    spec = memory.spec
    asked = AttentionSpec(
        memory.query_heads, spec.num_kv_heads, spec.head_dim, 0.3, spec.dtype, "cpu", **attention_options
    )
    try:
        return Attention(select_backend(asked, backend_name), asked)
    except BackendError as error:
        pytest.skip(str(error))


@given(
    parsers.parse(
        "a pool of {size:Size} for {heads:d} query heads and {kv_heads:d} KV heads",
        extra_types={"Size": memory_size},
    ),
    target_fixture="memory",
)
def a_pool_for_heads(size: MemorySize, heads: int, kv_heads: int) -> Memory:
    spec = KVSpec(SPEC.num_layers, kv_heads, SPEC.head_dim, SPEC.dtype)
    return Memory(size.build(spec), heads)


@given(
    parsers.parse(
        "a pool of {size:Size} for {heads:d} query heads and {kv_heads:d} KV heads of {dim:d} numbers in {dtype}",
        extra_types={"Size": memory_size},
    ),
    target_fixture="memory",
)
def a_pool_in(size: MemorySize, heads: int, kv_heads: int, dim: int, dtype: str) -> Memory:
    return Memory(size.build(KVSpec(SPEC.num_layers, kv_heads, dim, dtype)), heads)


@given(
    parsers.parse("attention with a window of {window} tokens and scores capped at {cap}"),
    target_fixture="attention_options",
)
def window_and_cap(window: str, cap: str) -> dict[str, Any]:
    return {
        "sliding_window": None if window == "no" else int(window),
        "soft_cap": None if cap == "no" else float(cap),
    }


@given(parsers.parse('a sequence "{name}" of {tokens:d} tokens whose V is the number of its KV head'))
def numbered_heads(memory: Memory, name: str, tokens: int) -> None:
    memory.numbered_heads = True
    memory.prefill(name, tokens)


@given("every token slot without a token holds garbage")
def garbage(memory: Memory) -> None:
    memory.fill_unused(float("nan"))


@when(parsers.parse('block {entry:d} of "{name}" moves to another place in the pool, and its old place is wiped'))
def move_block(memory: Memory, entry: int, name: str) -> None:
    pool, slot = memory.pool, memory.slots[name]
    old, (new,) = memory.blocks(name)[entry], pool.allocator.allocate(1)
    memory.storage.copy_blocks([old], [new])
    pool.tables.entries[slot, entry] = new
    pool.allocator.free([old])
    memory.fill_unused(float("nan"))
    memory.audit()


@when(parsers.re(NAMES + r" attends? with (?P<tokens>\d+) new tokens?"), converters=_TYPES)
def attend(memory: Memory, attention: Attention, names: list[str], tokens: int) -> None:
    attend_repeatedly(memory, attention, names, tokens, 1)


@when(
    parsers.re(NAMES + r" attends? with (?P<tokens>\d+) new tokens? each, (?P<times>\d+) times"), converters=_TYPES
)
def attend_repeatedly(memory: Memory, attention: Attention, names: list[str], tokens: int, times: int) -> None:
    attention.asked.clear()
    for _ in range(times):
        attention.step(memory, dict.fromkeys(names, tokens))


@when("they attend in one batch with new tokens")
def attend_in_batch(memory: Memory, attention: Attention, datatable: list[list[str]]) -> None:
    attention.asked.clear()
    attention.step(memory, {name: int(tokens) for name, tokens in datatable[1:]})


@then("each sequence gets what plain attention gives")
@then(parsers.parse("each sequence gets what plain attention gives with each KV head repeated {group:d} times"))
def as_plain_attention(memory: Memory, attention: Attention, group: int | None = None) -> None:
    assert group in (None, attention.spec.num_heads // attention.spec.num_kv_heads)
    assert attention.asked
    tolerance = _TOLERANCE[attention.spec.dtype]
    for asked in attention.asked:
        assert asked.out.dtype == asked.q.dtype
        expected = attention.expected(memory, asked)
        torch.testing.assert_close(asked.out.float(), expected, atol=tolerance, rtol=tolerance)


@then("each sequence gets what it gets alone")
@then(parsers.parse('"{name}" gets the same from a pool whose blocks are in order'))
def as_alone(memory: Memory, attention: Attention) -> None:
    assert attention.asked
    for asked in attention.asked:
        torch.testing.assert_close(asked.out, attention.alone(memory, asked), **_CLOSE)


@then(parsers.parse("its query heads answer {answers}"))
def heads_answer(attention: Attention, answers: str) -> None:
    expected = torch.tensor([float(answer) for answer in answers.split()])
    (asked,) = attention.asked
    torch.testing.assert_close(asked.out, expected[:, None].expand_as(asked.out), **_CLOSE)


@then(parsers.parse("a token takes {size:d} bytes in the pool"))
def token_bytes(memory: Memory, size: int) -> None:
    storage, stats = memory.storage, memory.pool.stats()
    assert (storage.keys.nbytes + storage.values.nbytes) / (stats.blocks_total * stats.block_size) == size
