"""K and V in int8: every backend reads the same numbers, whichever wrote them, and scales go wherever blocks go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvlab.attention.backends.concat import ConcatAttention
from kvlab.attention.backends.triton import TritonAttention
from kvlab.attention.base import AttentionSpec
from kvlab.attention.registry import attention_backends, select_backend
from kvlab.errors import BackendError
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage, quantize
from kvlab.models.config import RopeConfig
from kvlab.models.ops.base import Norm, Ops
from kvlab.models.ops.cpu_ops import CpuOps
from kvlab.models.ops.torch_ops import TorchOps
from kvlab.models.rope import RotaryEmbedding
from tests.parity.ragged import LAYER, RaggedBatch, make_batch, make_spec, naive_attention

BACKENDS = [name for name in attention_backends() if name not in ("concat", "triton")]
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=16, dtype="int8")


def agree(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Up to a share of the largest number expected."""
    largest = expected.abs().max().item()
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance * largest, rtol=0)


def attend(name: str, batch: RaggedBatch, spec: AttentionSpec) -> torch.Tensor:
    try:
        backend = select_backend(spec, name)
    except BackendError as error:
        pytest.skip(str(error))
    return backend.forward(batch.q, batch.view, LAYER, spec)


class TestQuantize:
    def test_is_off_by_at_most_half_a_step(self) -> None:
        x = torch.randn(50, 33) * torch.logspace(-20, 20, 50)[:, None]
        numbers, scales = quantize(x)
        assert (numbers.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (50,))
        assert ((numbers * scales[:, None] - x).abs() <= 0.5001 * scales[:, None]).all()
        assert (numbers.abs().amax(dim=-1) == 127).all()

    def test_zeros_stay_zeros(self) -> None:
        numbers, scales = quantize(torch.zeros(2, 5))
        assert not numbers.any()
        assert not scales.any()

    @pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
    def test_what_is_not_finite_is_not_hidden(self, wrong: float) -> None:
        numbers, scales = quantize(torch.tensor([[1.0, wrong], [1.0, 2.0]]))
        assert scales.isfinite().tolist() == [False, True]
        assert numbers[1].tolist() == [64, 127]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize(("group", "window", "soft_cap"), [(1, None, None), (2, 5, None), (4, None, 0.5)])
def test_backends_agree_with_concat(
    name: str, dtype: str, block_size: int, group: int, window: int | None, soft_cap: float | None
) -> None:
    """Poisoned scales around a sequence's tokens would show."""
    spec = make_spec(group, 80, dtype, window=window, soft_cap=soft_cap, kv_dtype="int8")
    batch = make_batch(spec, block_size, [(0, 40), (35, 1), (16, 16), (7, 3), (0, 1), (63, 1)])
    expected = ConcatAttention().forward(batch.q, batch.view, LAYER, spec)
    agree(attend(name, batch, spec), expected, TOLERANCE[dtype])


def test_concat_is_attention_over_what_was_stored_up_to_its_rounding() -> None:
    spec = make_spec(2, 64, kv_dtype="int8")
    batch = make_batch(spec, 4, [(0, 20), (20, 1)])
    rounded = replace(
        batch,
        keys=[numbers * scales[..., None] for numbers, scales in map(quantize, batch.keys)],
        values=[numbers * scales[..., None] for numbers, scales in map(quantize, batch.values)],
    )
    found = ConcatAttention().forward(batch.q, batch.view, LAYER, spec)
    agree(found, naive_attention(rounded, spec), 1e-5)
    agree(found, naive_attention(batch, spec), 2e-2)


def test_triton_refuses_with_a_reason() -> None:
    support = TritonAttention().supports(make_spec(2, 64, kv_dtype="int8"))
    assert not support.ok
    assert "int8" in support.reason or "not installed" in support.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [2, 26, 64, 80])
def test_both_ways_of_storing_store_the_same(head_dim: int, dtype: torch.dtype) -> None:
    """Up to one step where a rounding before it differs; what is not written keeps its bits."""
    spec, tokens = replace(SPEC, head_dim=head_dim), 11
    qkv = torch.randn(tokens, 8, head_dim).to(dtype)
    q_norm, k_norm = (Norm(torch.rand(head_dim).to(dtype), 1e-6) for _ in range(2))
    rotary = RotaryEmbedding(RopeConfig(10_000.0), head_dim, 64, dtype)

    def store(ops: Ops) -> KVStorage:
        storage = KVStorage(spec, 4, 4)
        for tensor in (storage.keys, storage.values):
            tensor.fill_(99)
        for scales in (storage.key_scales, storage.value_scales):
            assert scales is not None
            scales.fill_(99)
        pool = PagedKVCachePool(4, 4, 16, storage)
        view = pool.view([pool.allocate_slot(tokens)], [tokens])
        ops.rotate_and_store(qkv, (q_norm, k_norm), ops.angles(rotary, view.positions), view, 1)
        return storage

    native, readable = store(CpuOps()), store(TorchOps())
    for name in ("keys", "values"):
        found, expected = getattr(native, name), getattr(readable, name)
        assert (found.int() - expected.int()).abs().max() <= 2
        assert (found != expected).float().mean() < 0.1
        assert (found == 99).all(dim=-1).sum() >= 2 * 4 * 4 * 2 - tokens * 2
    for name in ("key_scales", "value_scales"):
        found, expected = getattr(native, name), getattr(readable, name)
        torch.testing.assert_close(found, expected, atol=0, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
        assert torch.equal(found == 99, expected == 99)


class TestBytes:
    @pytest.mark.parametrize("head_dim", [16, 128])
    def test_scales_are_counted(self, head_dim: int) -> None:
        spec = replace(SPEC, head_dim=head_dim)
        assert spec.bytes_per_token == 2 * 2 * 2 * (head_dim + 4)
        assert KVStorage(spec, 5, 4).num_bytes == 5 * 4 * spec.bytes_per_token

    def test_nearly_twice_the_tokens_of_bfloat16(self) -> None:
        int8, half = (KVSpec(28, 8, 128, dtype).bytes_per_token for dtype in ("int8", "bfloat16"))
        assert half / int8 == pytest.approx(256 / 132)


class TestScalesGoWithTheirBlocks:
    def pool(self, **options: Any) -> PagedKVCachePool:
        return PagedKVCachePool(12, 4, 40, KVStorage(SPEC, 12, 4), **options)

    def write(self, pool: BlockPool, slot: int, tokens: int) -> torch.Tensor:
        """Random K, and V their negative, in both layers; K `[tokens, kv_heads, head_dim]`."""
        k = torch.randn(tokens, 2, 16) * torch.rand(tokens, 2, 1) * 100
        view = pool.view([slot], [tokens])
        for layer in range(2):
            view.update(layer, k, -k)
        view.advance()
        return k

    def assert_holds(self, pool: BlockPool, slot: int, expected: torch.Tensor) -> None:
        view = pool.view([slot], [1])
        for layer in range(2):
            k, v = view.gather(layer, 0)
            numbers, scales = quantize(expected)
            exact = (numbers * scales[..., None]).transpose(0, 1)
            assert torch.equal(k[:, : len(expected)], exact)
            assert torch.equal(v[:, : len(expected)], -exact)
        view.rollback()

    def test_a_block_copied_before_it_is_written(self) -> None:
        pool = self.pool()
        slot = pool.allocate_slot(6)
        before = self.write(pool, slot, 6)
        fork = pool.fork_slot(slot)
        ours, theirs = self.write(pool, slot, 1), self.write(pool, fork, 3)
        assert pool.counters().cow_copies == 1
        self.assert_holds(pool, slot, torch.cat([before, ours]))
        self.assert_holds(pool, fork, torch.cat([before, theirs]))

    def test_a_shared_prefix(self) -> None:
        pool = self.pool(prefix_sharing=True)
        prompt = list(range(10))
        slot = pool.allocate_slot(token_ids=prompt)
        stored = self.write(pool, slot, 10)
        second = pool.allocate_slot(token_ids=prompt)
        assert pool.get_seq_len(second) == 8
        rest = self.write(pool, second, 2)
        self.assert_holds(pool, second, torch.cat([stored[:8], rest]))

    def test_a_contiguous_fork(self) -> None:
        pool = ContiguousKVCachePool(2, 8, KVStorage(SPEC, 2, 8))
        slot = pool.allocate_slot(5)
        stored = self.write(pool, slot, 5)
        self.assert_holds(pool, pool.fork_slot(slot), stored)
