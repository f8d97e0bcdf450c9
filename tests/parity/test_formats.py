"""Formats of K and V: every backend reads the same numbers, whichever wrote them; scales go wherever blocks go."""

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
from kvlab.kv.formats import FORMATS, quantize
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage
from kvlab.models.config import RopeConfig
from kvlab.models.ops.base import Norm, Ops
from kvlab.models.ops.cpu_ops import CpuOps
from kvlab.models.ops.torch_ops import TorchOps
from kvlab.models.rope import RotaryEmbedding
from tests.parity.ragged import LAYER, RaggedBatch, make_batch, make_spec, naive_attention

BACKENDS = [name for name in attention_backends() if name not in ("concat", "triton")]
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=32, dtype="int8")
CONVERTED = ("int8", "fp8_e4m3", "fp8_e5m2", "int4")
#: Of K and of V: each alone, and some apart.
PAIRS = [*((name, name) for name in CONVERTED), ("int8", "int4"), ("fp8_e5m2", "float32")]


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


class TestFp8:
    @pytest.mark.parametrize(("name", "step"), [("fp8_e4m3", 2**-4), ("fp8_e5m2", 2**-3)])
    def test_is_off_by_at_most_half_a_step_of_each_number(self, name: str, step: float) -> None:
        x = torch.randn(50, 33) * torch.logspace(-20, 20, 50)[:, None]
        numbers, scales = FORMATS[name].pack(x)
        found = FORMATS[name].unpack(numbers, scales)
        largest = x.abs().amax(dim=-1, keepdim=True)
        assert ((found - x).abs() <= step * x.abs() + 2**-15 * largest).all()
        torch.testing.assert_close(found.abs().amax(dim=-1, keepdim=True), largest)

    @pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
    def test_has_no_subnormal_numbers(self, name: str) -> None:
        info = torch.finfo(FORMATS[name].dtype)
        smallest = info.smallest_normal
        row = torch.tensor([info.max, smallest, -smallest, 0.99 * smallest, -0.5 * smallest, 0])
        numbers, scales = FORMATS[name].pack(row)
        assert numbers.float().tolist() == [info.max, smallest, -smallest, 0, 0, 0]
        assert scales == 1

    @pytest.mark.parametrize("name", CONVERTED)
    def test_what_is_not_finite_is_not_hidden(self, name: str) -> None:
        rows = torch.ones(4, 32)
        rows[0, 3], rows[1, 5], rows[2, 7] = float("nan"), float("inf"), float("-inf")
        found = FORMATS[name].unpack(*FORMATS[name].pack(rows))
        assert found.isfinite().any(dim=-1).tolist() == [False, False, False, True]


class TestInt4:
    def test_is_off_by_at_most_one_step_of_its_group(self) -> None:
        """Half a step, but for numbers near the end that the largest does not have."""
        x = torch.randn(50, 64) * torch.logspace(-20, 20, 50)[:, None]
        stored, scales = FORMATS["int4"].pack(x)
        assert (stored.dtype, stored.shape, scales) == (torch.uint8, (50, 36), None)
        found = FORMATS["int4"].unpack(stored, None)
        steps = x.view(50, 2, 32).abs().amax(dim=-1, keepdim=True) / 8
        errors = (found - x).view(50, 2, 32).abs() / steps
        assert errors.max() <= 1.05
        assert (errors <= 0.55).float().mean() > 0.95

    def test_two_numbers_to_a_byte_behind_the_scale(self) -> None:
        """Number i in the lower half of byte i, number i + 16 in the upper half."""
        row = torch.arange(32.0) - 16
        row[0] = -16.0
        stored, _ = FORMATS["int4"].pack(row)
        assert stored[:2].view(torch.bfloat16).item() == 2
        assert [int(stored[2] & 15), int(stored[2] >> 4)] == [0, 8]
        assert [int(stored[17] & 15), int(stored[17] >> 4)] == [8, 15]
        assert FORMATS["int4"].unpack(stored, None)[0] == -16

    def test_zeros_stay_zeros(self) -> None:
        assert not FORMATS["int4"].unpack(*FORMATS["int4"].pack(torch.zeros(3, 64))).any()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kv_dtypes", PAIRS)
@pytest.mark.parametrize(
    ("block_size", "group", "window", "soft_cap"),
    [(1, 1, None, None), (4, 2, 5, None), (16, 4, None, 0.5), (64, 2, None, None)],
)
def test_backends_agree_with_concat(
    name: str,
    dtype: str,
    kv_dtypes: tuple[str, str],
    block_size: int,
    group: int,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Poison around a sequence's tokens would show."""
    kv_dtypes = kv_dtypes[0], dtype if kv_dtypes[1] == "float32" else kv_dtypes[1]
    head_dim = 96 if "int4" in kv_dtypes else 80
    spec = make_spec(group, head_dim, dtype, window=window, soft_cap=soft_cap, kv_dtypes=kv_dtypes)
    batch = make_batch(spec, block_size, [(0, 40), (35, 1), (16, 16), (7, 3), (0, 1), (63, 1)])
    expected = ConcatAttention().forward(batch.q, batch.view, LAYER, spec)
    agree(attend(name, batch, spec), expected, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("kv_dtype", "error"), [("int8", 2e-2), ("fp8_e4m3", 6e-2), ("fp8_e5m2", 1.2e-1), ("int4", 0.3)]
)
def test_concat_is_attention_over_what_was_stored_up_to_its_rounding(kv_dtype: str, error: float) -> None:
    spec, kind = make_spec(2, 64, kv_dtypes=(kv_dtype, kv_dtype)), FORMATS[kv_dtype]
    batch = make_batch(spec, 4, [(0, 20), (20, 1)])
    rounded = replace(
        batch,
        keys=[kind.unpack(*kind.pack(keys)) for keys in batch.keys],
        values=[kind.unpack(*kind.pack(values)) for values in batch.values],
    )
    found = ConcatAttention().forward(batch.q, batch.view, LAYER, spec)
    agree(found, naive_attention(rounded, spec), 1e-5)
    agree(found, naive_attention(batch, spec), error)


def test_triton_refuses_with_a_reason() -> None:
    support = TritonAttention().supports(make_spec(2, 64, kv_dtypes=("int4", "int4")))
    assert not support.ok
    assert "int4" in support.reason or "not installed" in support.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kv_dtypes", "head_dim"),
    [
        *((pair, head_dim) for pair in PAIRS[:3] for head_dim in (2, 26, 64, 80)),
        (("int4", "int4"), 64),
        (("int8", "int4"), 96),
        (("int4", "bfloat16"), 32),
    ],
)
def test_both_ways_of_storing_store_the_same(kv_dtypes: tuple[str, str], head_dim: int, dtype: torch.dtype) -> None:
    """Up to one step where a rounding before it differs; what is not written keeps its bits."""
    key_dtype, value_dtype = kv_dtypes[0], kv_dtypes[1]
    if value_dtype == "bfloat16":
        value_dtype = str(dtype).removeprefix("torch.")
    spec, tokens = KVSpec(2, 2, head_dim, key_dtype, value_dtype), 11
    qkv = torch.randn(tokens, 8, head_dim).to(dtype)
    q_norm, k_norm = (Norm(torch.rand(head_dim).to(dtype), 1e-6) for _ in range(2))
    rotary = RotaryEmbedding(RopeConfig(10_000.0), head_dim, 64, dtype)

    def store(ops: Ops) -> KVStorage:
        storage = KVStorage(spec, 4, 4)
        for tensor in storage._tensors:
            tensor.view(torch.uint8).fill_(77)
        pool = PagedKVCachePool(4, 4, 16, storage)
        view = pool.view([pool.allocate_slot(tokens)], [tokens])
        ops.rotate_and_store(qkv, (q_norm, k_norm), ops.angles(rotary, view.positions), view, 1)
        return storage

    native, readable = store(CpuOps()), store(TorchOps())
    for (kind, found, scales), (_, expected, expected_scales) in zip(native._both, readable._both, strict=True):
        untouched = (expected.view(torch.uint8) == 77).all(dim=-1)
        assert untouched.sum() >= 2 * 4 * 4 * 2 - tokens * 2
        assert torch.equal((found.view(torch.uint8) == 77).all(dim=-1), untouched)
        written = ~untouched
        numbers, those = (
            kind.unpack(x[written], None if y is None else y[written])
            for x, y in ((found, scales), (expected, expected_scales))
        )
        step = {torch.int8: 2 / 127, torch.float8_e4m3fn: 2**-3, torch.float8_e5m2: 2**-2, torch.uint8: 2 / 8}
        allowed = step.get(kind.dtype, 2e-2)
        assert (numbers - those).abs().max() <= allowed * those.abs().max()
        assert (numbers - those).abs().mean() <= 0.1 * allowed * those.abs().max()


class TestBytes:
    @pytest.mark.parametrize(
        ("kv_dtypes", "head_dim", "head_bytes"),
        [
            (("int8", "int8"), 16, 2 * (16 + 4)),
            (("fp8_e4m3", "fp8_e5m2"), 128, 2 * (128 + 4)),
            (("int4", "int4"), 128, 2 * 4 * (2 + 16)),
            (("int8", "int4"), 96, 96 + 4 + 3 * 18),
            (("bfloat16", "int4"), 64, 128 + 36),
        ],
    )
    def test_scales_are_counted(self, kv_dtypes: tuple[str, str], head_dim: int, head_bytes: int) -> None:
        spec = KVSpec(2, 3, head_dim, *kv_dtypes)
        assert spec.bytes_per_token == 2 * 3 * head_bytes
        assert KVStorage(spec, 5, 4).num_bytes == 5 * 4 * spec.bytes_per_token

    def test_nearly_twice_the_tokens_of_bfloat16(self) -> None:
        int8, half = (KVSpec(28, 8, 128, dtype).bytes_per_token for dtype in ("int8", "bfloat16"))
        assert half / int8 == pytest.approx(256 / 132)


@pytest.fixture(params=PAIRS, ids="-".join)
def stored_in(request: pytest.FixtureRequest) -> KVSpec:
    key_dtype, value_dtype = request.param
    return replace(SPEC, dtype=key_dtype, value_dtype=value_dtype)


class TestScalesGoWithTheirBlocks:
    def pool(self, spec: KVSpec, **options: Any) -> PagedKVCachePool:
        return PagedKVCachePool(12, 4, 40, KVStorage(spec, 12, 4), **options)

    def write(self, pool: BlockPool, slot: int, tokens: int) -> torch.Tensor:
        """Random K, and V their negative, in both layers; K `[tokens, kv_heads, head_dim]`."""
        k = torch.randn(tokens, 2, 32) * torch.rand(tokens, 2, 1) * 100
        view = pool.view([slot], [tokens])
        for layer in range(2):
            view.update(layer, k, -k)
        view.advance()
        return k

    def assert_holds(self, pool: BlockPool, slot: int, expected: torch.Tensor) -> None:
        view = pool.view([slot], [1])
        assert pool.storage is not None
        for layer in range(2):
            k, v = view.gather(layer, 0)
            for found, written, dtype in zip((k, v), (expected, -expected), pool.storage.spec.dtypes, strict=True):
                kind = FORMATS[dtype]
                exact = kind.unpack(*kind.pack(written)).transpose(0, 1)
                assert torch.equal(found[:, : len(expected)], exact)
        view.rollback()

    def test_a_block_copied_before_it_is_written(self, stored_in: KVSpec) -> None:
        pool = self.pool(stored_in)
        slot = pool.allocate_slot(6)
        before = self.write(pool, slot, 6)
        fork = pool.fork_slot(slot)
        ours, theirs = self.write(pool, slot, 1), self.write(pool, fork, 3)
        assert pool.counters().cow_copies == 1
        self.assert_holds(pool, slot, torch.cat([before, ours]))
        self.assert_holds(pool, fork, torch.cat([before, theirs]))

    def test_a_shared_prefix(self, stored_in: KVSpec) -> None:
        pool = self.pool(stored_in, prefix_sharing=True)
        prompt = list(range(10))
        slot = pool.allocate_slot(token_ids=prompt)
        stored = self.write(pool, slot, 10)
        second = pool.allocate_slot(token_ids=prompt)
        assert pool.get_seq_len(second) == 8
        rest = self.write(pool, second, 2)
        self.assert_holds(pool, second, torch.cat([stored[:8], rest]))

    def test_a_contiguous_fork(self, stored_in: KVSpec) -> None:
        pool = ContiguousKVCachePool(2, 8, KVStorage(stored_in, 2, 8))
        slot = pool.allocate_slot(5)
        stored = self.write(pool, slot, 5)
        self.assert_holds(pool, pool.fork_slot(slot), stored)
