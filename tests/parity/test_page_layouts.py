"""A backend gets K and V in the layout that it states, and computes the same in either."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvlab.attention.backends.concat import ConcatAttention
from kvlab.attention.base import AttentionBackend, AttentionSpec
from kvlab.attention.registry import select_backend
from kvlab.config import AttentionConfig, EngineConfig, ExecutorConfig, KVConfig, ModelConfig
from kvlab.core import Request, SamplingParams
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.core import EngineCore
from kvlab.engine.service import Engine
from kvlab.errors import BackendError
from kvlab.kv.pool import BlockPool
from kvlab.kv.spec import KVSpec, PageLayout
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView
from tests.parity.ragged import LAYER, make_batch, make_spec

BATCH = [(0, 9), (20, 1), (3, 5), (15, 1), (0, 1)]
MODEL = ModelConfig(
    "tiny",
    "qwen3",
    {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
)


class NhdAttention(ConcatAttention):
    """As a backend of FlashInfer's would be: it takes pages `[blocks, block_size, kv_heads, head_dim]`."""

    name = "nhd"
    layout = PageLayout.NHD

    def forward(
        self, q: torch.Tensor, view: CacheView, layer: int, spec: AttentionSpec, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert view.keys(layer).transpose(1, 2).is_contiguous()
        assert view.values(layer).transpose(1, 2).is_contiguous()
        return super().forward(q, view, layer, spec, sinks)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", ["concat", "online_softmax", "safe_softmax", "sdpa", "triton"])
def test_the_same_in_either_layout(name: str, kv_dtype: str) -> None:
    """What is written, gathered and read block by block."""
    spec = make_spec(2, 16, kv_dtypes=(kv_dtype, kv_dtype))
    try:
        backend = select_backend(spec, name)
    except BackendError as error:
        pytest.skip(str(error))
    hnd, nhd = (make_batch(spec, 4, BATCH, layout=layout) for layout in PageLayout)
    found, expected = (backend.forward(batch.q, batch.view, LAYER, spec) for batch in (nhd, hnd))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("kernels", [True, False])
def test_an_engine_gives_a_backend_its_layout(kernels: bool, kv_dtype: str) -> None:
    """And the same tokens, whether kernels store K and V or PyTorch does."""
    kv = KVConfig(num_blocks=64, block_size=4, dtype=kv_dtype, prefix_sharing=True)
    config = EngineConfig(
        MODEL,
        kv,
        attention=AttentionConfig("concat"),
        executor=ExecutorConfig(device="cpu", dtype="float32", kernels=kernels),
    )
    prompts = [(1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 5, 6, 7, 8, 50), (40, 41)]
    requests = [
        Request(str(i), prompt, SamplingParams(max_tokens=12, ignore_eos=True)) for i, prompt in enumerate(prompts)
    ]
    plan, tokens = plan_engine(config), []
    for backend in (plan.computed_by.attention, NhdAttention()):
        core = build_engine(replace(plan, kernels=plan.computed_by._replace(attention=backend)))
        assert storage_of(core).layout is backend.layout
        outputs = list(Engine(core).generate(requests))
        tokens.append([[o.token_id for o in outputs if o.request_id == str(i)] for i in range(len(prompts))])
    assert tokens[0] == tokens[1]
    assert min(len(of_one) for of_one in tokens[0]) == 12


def test_a_layout_that_no_cache_has_is_refused_by_name() -> None:
    class Blocked(ConcatAttention):
        name = "blocked"
        layout = "HDN"  # type: ignore[assignment]

    spec = make_spec(2, 16)
    reason = "wants K and V laid out as HDN; a cache provides HND, NHD"
    with pytest.raises(BackendError, match=f"attention=blocked cannot run here: {reason}"):
        select_backend(spec, "blocked", {"blocked": Blocked})
    with pytest.raises(BackendError, match=f"blocked: {reason}"):
        select_backend(spec, among={"blocked": Blocked})
    assert select_backend(spec, among={"blocked": Blocked, "nhd": NhdAttention}).name == "nhd"


def storage_of(core: EngineCore) -> KVStorage:
    assert isinstance(core.pool, BlockPool)
    assert core.pool.storage is not None
    return core.pool.storage


@pytest.mark.parametrize("layout", PageLayout)
def test_both_take_the_same_bytes_in_the_stated_order(layout: PageLayout) -> None:
    for spec in (KVSpec(2, 3, 8, "float32"), KVSpec(2, 3, 8, "int8")):
        storage = KVStorage(spec, 5, 4, layout=layout)
        assert storage.num_bytes == 5 * 4 * spec.bytes_per_token
        assert storage.keys.shape == (2, 5, 3, 4, 8)
        in_memory = storage.keys if layout is PageLayout.HND else storage.keys.transpose(2, 3)
        assert in_memory.is_contiguous()


def test_a_decoder_refuses_a_cache_in_another_layout() -> None:
    plan = plan_engine(EngineConfig(MODEL, KVConfig(num_blocks=8)))
    backend: AttentionBackend = NhdAttention()
    core = build_engine(replace(plan, kernels=plan.computed_by._replace(attention=backend)))
    storage_of(core).layout = PageLayout.HND
    (output,) = Engine(core).generate(Request("a", (1, 2), SamplingParams(max_tokens=1)))
    assert "attention=nhd reads K and V laid out as NHD" in str(output)
