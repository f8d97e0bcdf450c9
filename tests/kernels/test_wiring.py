"""Where the engine takes a kernel on a GPU: it does what PyTorch does on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvlab.attention import sdpa
from kvlab.attention.base import AttentionSpec
from kvlab.attention.concat import ConcatAttention
from kvlab.kernels import triton_runs_on
from kvlab.kv.paged import PagedKVCachePool
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView
from kvlab.models import rope
from tests.kernels.paged import assert_close, bits, unchanged


def test_kernels_are_for_gpus() -> None:
    assert triton_runs_on(torch.device("cuda:0"))
    assert not triton_runs_on(torch.device("cpu"))


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


def test_a_step_is_written(device: torch.device) -> None:
    spec = KVSpec(2, 2, 64, "float32")
    storages = [KVStorage(spec, 12, 8, device) for _ in range(2)]
    storages[0].has_kernels, storages[1].has_kernels = True, False
    for by_kernel, by_torch in zip(*map(steps, storages), strict=True):
        qkv = torch.randn(by_kernel.num_tokens, 8, 64, device=device)
        k, v = qkv[:, 4:6], qkv[:, 6:]
        for view in (by_kernel, by_torch):
            view.update(1, k, v)
    assert (by_kernel.slot_mapping == -1).sum() == 1
    assert storages[0].keys[1].any()
    assert unchanged(bits(storages[1].keys, storages[1].values), storages[0].keys, storages[0].values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_are_rotated(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = rope.RotaryEmbedding(rope.RopeConfig(10_000.0), 64, 30, dtype, device)
    angles = tables.angles(torch.tensor([0, 7, 29], device=device))
    q, k, v = torch.randn(3, 8, 64, device=device).to(dtype).split([4, 2, 2], dim=1)
    before = v.clone()
    expected = [rope.rotate(x.double(), *(part.double() for part in angles)) for x in (q, k)]
    monkeypatch.setattr(rope, "triton_runs_on", lambda device: True)
    found = rope.rotate_both(q, k, *angles)
    for turned, wanted in zip(found, expected, strict=True):
        assert_close(turned, wanted)
    assert torch.equal(v, before)


def test_sdpa_takes_results_as_a_gpu_lays_them_out(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query after query, each with all its heads."""
    attend = sdpa.scaled_dot_product_attention

    def attend_as_a_gpu(*args: Any, **options: Any) -> torch.Tensor:
        return attend(*args, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", attend_as_a_gpu)
    spec = AttentionSpec(8, 2, 64, 0.2, "float32", str(device))
    for view in steps(KVStorage(KVSpec(1, 2, 64, "float32"), 12, 8, device)):
        q, k, v = torch.randn(view.num_tokens, 12, 64, device=device).split([8, 2, 2], dim=1)
        view.update(0, k, v)
        assert_close(sdpa.SdpaAttention().forward(q, view, 0, spec), ConcatAttention().forward(q, view, 0, spec))
