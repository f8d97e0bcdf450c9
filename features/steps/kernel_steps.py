"""Triton kernels on what a real pool holds and on the model's own angles, compared with their references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pytest_bdd import given, parsers, then, when

from features.steps.support import Memory, MemorySize, memory_size, plain_attention
from kvlab.kv.spec import KVSpec
from kvlab.models.config import RopeConfig
from kvlab.models.rope import RotaryEmbedding, rotate

_SCALE = 0.2
_LAYER = 1
_CLOSE: Any = {"atol": 1e-5, "rtol": 1e-5}
_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def numbers_in(text: str) -> list[int]:
    """The numbers of `0, 1, 15`."""
    return [int(number) for number in text.split(",")]


@dataclass
class Decoded:
    """One query of each sequence, what it got, and a layer's K and V before and after."""

    q: torch.Tensor
    out: torch.Tensor
    before: list[torch.Tensor]
    after: list[torch.Tensor]


@dataclass
class Turning:
    """q and k of a token at each position, and the base of each token's angle table."""

    positions: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    bases: list[float]
    shared: bool = True
    turned: tuple[torch.Tensor, torch.Tensor] | None = None

    def table(self, base: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines `[64, head_dim]` as the model computes them."""
        embedding = RotaryEmbedding(RopeConfig(base), self.q.shape[-1], 64, torch.float32)
        cos, sin = embedding.tables.at(torch.arange(64))
        return cos.squeeze(1), sin.squeeze(1)

    def angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's own, `[T, head_dim]`."""
        rows = [
            [part[at] for part in self.table(base)] for base, at in zip(self.bases, self.positions, strict=True)
        ]
        cos, sin = (torch.stack(part) for part in zip(*rows, strict=True))
        return cos, sin


@given(
    parsers.parse(
        "a pool of {size:Size} for {heads:d} query heads and {kv_heads:d} KV heads of {dim:d} numbers",
        extra_types={"Size": memory_size},
    ),
    target_fixture="memory",
)
def a_pool_for_large_heads(size: MemorySize, heads: int, kv_heads: int, dim: int) -> Memory:
    return Memory(size.build(KVSpec(2, kv_heads, dim, "float32")), heads)


@given(parsers.parse("one sequence for each of the lengths {lengths}"))
def sequences_of(memory: Memory, lengths: str) -> None:
    for length in numbers_in(lengths):
        memory.prefill(f"sequence of {length}", length)


@when("the decode kernel computes one query of each sequence", target_fixture="decoded")
@when(
    parsers.parse("the decode kernel computes one query of each sequence, {split:d} tokens to a program"),
    target_fixture="decoded",
)
def decode(memory: Memory, split: int | None = None) -> Decoded:
    pytest.importorskip("triton")
    from kvlab.kernels.triton.decode import paged_decode

    tables = [memory.blocks(name) for name in memory.slots]
    padded = [table + [0] * (max(map(len, tables)) - len(table)) for table in tables]
    lengths = [memory.length(name) for name in memory.slots]
    q = memory.random(len(tables), memory.query_heads, memory.spec.head_dim)
    before = [cache[_LAYER].clone() for cache in (memory.storage.keys, memory.storage.values)]
    after = [cache.to(_DEVICE, copy=True) for cache in before]
    metadata = [torch.tensor(numbers, dtype=torch.int32, device=_DEVICE) for numbers in (padded, lengths)]
    out = torch.full(q.shape, float("nan"), device=_DEVICE)
    paged_decode(q.to(_DEVICE), *after, *metadata, scale=_SCALE, split_tokens=split, out=out)
    return Decoded(q, out.cpu(), before, [cache.cpu() for cache in after])


@then("each query gets what plain attention over the gathered K and V gives")
def as_plain_attention_over_gathered(memory: Memory, decoded: Decoded) -> None:
    group = memory.query_heads // memory.spec.num_kv_heads
    for row, name in enumerate(memory.slots):
        length = memory.length(name)
        if length == 0:
            assert not decoded.out[row].any()
            continue
        kv = memory.read(name)[:, _LAYER].repeat_interleave(group, dim=2)  # [tokens, 2, heads, head_dim]
        expected = plain_attention(decoded.q[row : row + 1], kv[:, 0], kv[:, 1], length - 1, _SCALE)
        torch.testing.assert_close(decoded.out[row : row + 1], expected, **_CLOSE)


@then("the kernel has not changed a bit of K and V")
def query_unchanged(decoded: Decoded) -> None:
    for before, after in zip(decoded.before, decoded.after, strict=True):
        assert torch.equal(before.view(torch.int32), after.view(torch.int32))


@given(
    parsers.parse(
        "a token at each of the positions {positions}, with {heads:d} query heads and {kv_heads:d} KV heads "
        "of {dim:d} numbers"
    ),
    target_fixture="turning",
)
def tokens_to_turn(positions: str, heads: int, kv_heads: int, dim: int) -> Turning:
    """Tokens at the same position have the same q and k, so that nothing but their angles can tell them apart."""
    at = torch.tensor(numbers_in(positions))
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(int(at.max()) + 1, count, dim, generator=random)[at] for count in (heads, kv_heads))
    return Turning(at, q, k, [])


@given("one angle table for all sequences")
def one_table(turning: Turning) -> None:
    turning.bases = [10_000.0] * len(turning.positions)


@given("an angle table of another base for each sequence")
def tables(turning: Turning) -> None:
    turning.bases = [10_000.0 * 2**index for index in range(len(turning.positions))]
    turning.shared = False


@when("the rotary kernel turns q and k")
def turn(turning: Turning) -> None:
    pytest.importorskip("triton")
    from kvlab.kernels.triton.rotary import rotate_in_place

    q, k = turning.q.to(_DEVICE, copy=True), turning.k.to(_DEVICE, copy=True)
    cos, sin = turning.table(turning.bases[0]) if turning.shared else turning.angles()
    rows = turning.positions.to(_DEVICE) if turning.shared else None
    rotate_in_place(q, k, cos.to(_DEVICE), sin.to(_DEVICE), rows)
    turning.turned = q.cpu(), k.cpu()


@then("q and k are turned as the reference turns them")
def turned_as_the_reference(turning: Turning) -> None:
    assert turning.turned is not None
    cos, sin = (part.unsqueeze(1) for part in turning.angles())
    for found, x in zip(turning.turned, (turning.q, turning.k), strict=True):
        assert not torch.equal(found, x)
        torch.testing.assert_close(found, rotate(x, cos, sin), **_CLOSE)


@then("two tokens at the same position are turned by different angles")
def different_angles(turning: Turning) -> None:
    assert turning.turned is not None
    first, second = (turning.positions == 7).nonzero().flatten().tolist()
    for found, x in zip(turning.turned, (turning.q, turning.k), strict=True):
        assert torch.equal(x[first], x[second])
        assert (found[first] - found[second]).abs().max() > 0.1
