"""What a decoder takes on a GPU does what PyTorch does on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvlab.attention.backends import sdpa
from kvlab.attention.backends.concat import ConcatAttention
from kvlab.attention.base import AttentionSpec
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView
from kvlab.models.config import RopeConfig
from kvlab.models.ops.base import Norm
from kvlab.models.ops.torch_ops import TorchOps
from kvlab.models.ops.triton_ops import TritonOps
from kvlab.models.rope import RotaryEmbedding
from tests.kernels.paged import assert_close, bits, unchanged


def steps(storage: KVStorage) -> list[CacheView]:
    """Prompts; a chunk beside single tokens, one of which is the last of a cached prompt and not written."""
    pool = PagedKVCachePool(12, 8, 40, storage, prefix_sharing=True)
    prompt = list(range(16))
    slots = [pool.allocate_slot(token_ids=tokens) for tokens in (prompt, [40] * 5)]
    views = [pool.view(slots, [16, 5])]
    views[-1].advance()
    slots.append(pool.allocate_slot(token_ids=prompt))
    views.append(pool.view(slots, [1, 9, 1]))
    return views


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_normed_rotated_and_stored(dtype: torch.dtype, device: torch.device) -> None:
    """Triton's ops do what PyTorch's do, and leave alone what is stored already."""
    spec = KVSpec(2, 2, 64, str(dtype).removeprefix("torch."))
    rotary = RotaryEmbedding(RopeConfig(10_000.0), 64, 40, dtype, device)
    q_norm, k_norm = (Norm(torch.randn(64, device=device).to(dtype), 1e-6) for _ in range(2))
    storages = [KVStorage(spec, 12, 8, device) for _ in range(2)]
    for by_triton, by_torch in zip(*map(steps, storages), strict=True):
        qkv = torch.randn(by_triton.num_tokens, 8, 64, device=device).to(dtype)
        found, expected = (
            ops.rotate_and_store(qkv.clone(), (q_norm, k_norm), ops.angles(rotary, view.positions), view, 1)
            for ops, view in ((TritonOps(), by_triton), (TorchOps(), by_torch))
        )
        assert_close(found, expected)
    assert (by_triton.slot_mapping == -1).sum() == 1
    assert storages[0].keys[1].any()
    assert_close(storages[0].keys, storages[1].keys)
    assert unchanged(bits(storages[1].values), storages[0].values)


@pytest.mark.parametrize("kv_dtypes", [("float32", "int8"), ("int4", "int4"), ("fp8_e5m2", "float32")])
def test_formats_are_stored_as_pytorch_stores_them(kv_dtypes: tuple[str, str], device: torch.device) -> None:
    """The scatter kernel would store the numbers themselves."""
    spec, rotary = (
        KVSpec(1, 2, 64, *kv_dtypes),
        RotaryEmbedding(RopeConfig(10_000.0), 64, 40, torch.float32, device),
    )
    storages = [KVStorage(spec, 12, 8, device) for _ in range(2)]
    for by_triton, by_torch in zip(*map(steps, storages), strict=True):
        qkv = torch.randn(by_triton.num_tokens, 8, 64, device=device)
        for ops, view in ((TritonOps(), by_triton), (TorchOps(), by_torch)):
            ops.rotate_and_store(qkv.clone(), None, ops.angles(rotary, view.positions), view, 0)
    for block in range(12):
        for found, expected in zip(*(storage.read(0, block, 8) for storage in storages), strict=True):
            torch.testing.assert_close(found, expected, atol=0.3 * expected.abs().max().item(), rtol=0)
            assert (found - expected).abs().mean() <= 1e-2 * max(1e-9, expected.abs().mean().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_normed(dtype: torch.dtype, device: torch.device) -> None:
    x, residual = torch.randn(5, 100, device=device).to(dtype), torch.randn(5, 100, device=device)
    norm = Norm(1 + 0.1 * torch.randn(100, device=device), 1e-6)
    expected = TorchOps().add_norm(x, residual, norm)
    for found, wanted in zip(TritonOps().add_norm(x, residual.clone(), norm), expected, strict=True):
        assert_close(found, wanted)


def test_sdpa_takes_results_as_a_gpu_lays_them_out(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query after query, each with all its heads."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def attend_as_a_gpu(*args: Any, **options: Any) -> torch.Tensor:
        return attend(*args, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", attend_as_a_gpu)
    spec = AttentionSpec(8, 2, 64, 0.2, "float32", str(device))
    for view in steps(KVStorage(KVSpec(1, 2, 64, "float32"), 12, 8, device)):
        q, k, v = torch.randn(view.num_tokens, 12, 64, device=device).split([8, 2, 2], dim=1)
        view.update(0, k, v)
        assert_close(sdpa.SdpaAttention().forward(q, view, 0, spec), ConcatAttention().forward(q, view, 0, spec))
