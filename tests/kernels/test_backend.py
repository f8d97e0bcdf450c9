"""The backend `triton`: steps of a real pool, and when it says it can run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kvlab.attention.backends import triton as backend
from kvlab.attention.backends.concat import ConcatAttention
from kvlab.attention.backends.triton import TritonAttention
from kvlab.attention.base import AttentionSpec
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage

SPEC = AttentionSpec(8, 2, 64, 0.2, "float32", "cpu")
ON_GPU = replace(SPEC, device="cuda:0")


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    "steps",
    [
        [[20, 3, 41], [1, 1, 1], [1, 1, 1]],  # prefill together, decode together
        [[20, 1, 7], [1, 30, 1], [5, 1, 1]],  # decode beside chunks, before and behind them
        [[1, 1, 1], [2, 2, 2]],
    ],
)
def test_steps_of_a_pool(steps: list[list[int]], window: int | None, device: torch.device) -> None:
    storage = KVStorage(KVSpec(1, 2, 64, "float32"), 20, 8, device)
    for cache in (storage.keys, storage.values):
        cache.fill_(float("nan"))
    pool = PagedKVCachePool(20, 8, 64, storage)
    slots = [pool.allocate_slot() for _ in steps[0]]
    spec = replace(SPEC, device=str(device), sliding_window=window)
    for new in steps:
        view = pool.view(slots, new)
        q, *kv = (torch.randn(sum(new), heads, 64, device=device) for heads in (8, 2, 2))
        view.update(0, *kv)
        found = TritonAttention().forward(q, view, 0, spec)
        expected = ConcatAttention().forward(q, view, 0, spec)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert found.is_contiguous()
        view.advance()


class TestSupport:
    """What it says depends on the environment, and on nothing it would have to import."""

    def test_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        assert TritonAttention().supports(ON_GPU) == (True, "")

    def test_no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        ok, reason = TritonAttention().supports(SPEC)
        assert not ok
        assert "needs a GPU; TRITON_INTERPRET=1" in reason

    def test_interpreted_is_a_reservation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert TritonAttention().supports(SPEC) == (True, "interpreted, which is for tests")

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend, "find_spec", lambda name: None)
        assert TritonAttention().supports(ON_GPU) == (False, "triton is not installed")

    @pytest.mark.parametrize(
        ("spec", "reason"),
        [
            (replace(ON_GPU, causal=False), "only causal attention"),
            (replace(ON_GPU, head_dim=512), "at most 256"),
            (replace(ON_GPU, num_heads=512), "128 query heads"),
        ],
    )
    def test_what_the_kernels_cannot(self, spec: AttentionSpec, reason: str) -> None:
        ok, why = TritonAttention().supports(spec)
        assert not ok
        assert reason in why

    def test_asking_imports_no_triton(self) -> None:
        code = (
            "import sys, torch; before = 'triton' in sys.modules;"
            "from kvlab.attention.base import AttentionSpec;"
            "from kvlab.attention.registry import select_backend;"
            "select_backend(AttentionSpec(8, 2, 64, 0.2, 'float32', 'cpu'));"
            "sys.exit('triton' in sys.modules and not before)"
        )
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0
