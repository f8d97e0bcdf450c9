from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from kvlab.attention.registry import select_backend
from kvlab.config import ModelConfig
from kvlab.errors import BackendError, KernelError
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView
from kvlab.models.config import attention_specs
from kvlab.models.decoder import Decoder
from kvlab.models.families import decoder_config
from kvlab.models.ops.base import Ops
from kvlab.models.ops.cpu_ops import CpuOps
from kvlab.models.ops.torch_ops import TorchOps
from kvlab.models.rope import Angles, RotaryEmbedding
from kvlab.models.weights import DummyWeights
from kvlab.paths import CONF

FAMILIES = ["llama_tiny", "qwen2_tiny", "qwen3_tiny", "gemma3_tiny"]


def dummy_decoder(
    name: str, dtype: str = "float32", ops: Ops | None = None, logit_soft_cap: float | None = None
) -> Decoder:
    """A model of conf/model with dummy weights."""
    file: Any = OmegaConf.load(CONF / "model" / f"{name}.yaml")
    config = decoder_config(ModelConfig(**dict(file)))
    config = replace(config, logit_soft_cap=logit_soft_cap)
    weights = DummyWeights(getattr(torch, dtype), "cpu", norm_weight=config.initial_norm_weight)
    specs = attention_specs(config, dtype, "cpu")
    return Decoder(config, weights, select_backend(specs), specs, 128, ops)


def native_ops() -> Ops:
    try:
        return CpuOps()
    except KernelError as error:
        pytest.skip(str(error))


def view_of(decoder: Decoder, count: int, dtype: str) -> CacheView:
    pool = ContiguousKVCachePool(1, 128, KVStorage(decoder.config.kv_spec(dtype), 1, 128))
    return pool.view([pool.allocate_slot()], [count])


def last_logits(decoder: Decoder, ids: list[int], dtype: str = "float32") -> torch.Tensor:
    view = view_of(decoder, len(ids), dtype)
    return decoder.forward(torch.tensor(ids), view, torch.tensor([len(ids) - 1]))[0].float()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dummy_weights_give_logits_that_depend_on_the_whole_prompt(name: str, dtype: str) -> None:
    decoder = dummy_decoder(name, dtype)
    logits = last_logits(decoder, [*range(40)], dtype)
    other = last_logits(decoder, [99, *range(1, 40)], dtype)
    assert 0.3 < logits.std() < 3
    assert (logits - other).abs().max() > 0.01


@pytest.mark.parametrize("name", FAMILIES)
def test_rotary_angles_are_computed_once_for_each_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = dummy_decoder(name)
    angles, calls = TorchOps.angles, []

    def counted(self: TorchOps, rotary: RotaryEmbedding, positions: torch.Tensor) -> Angles:
        calls.append(rotary)
        return angles(self, rotary, positions)

    monkeypatch.setattr(TorchOps, "angles", counted)
    last_logits(decoder, [1, 2, 3])
    assert len(calls) == len(set(calls)) == (2 if name == "gemma3_tiny" else 1)


def test_attention_of_another_shape_is_refused_before_a_kernel_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = dummy_decoder("qwen3_tiny")
    kind = type(decoder.attention)
    monkeypatch.setattr(kind, "forward", lambda self, q, view, layer, spec: q[:, :1].contiguous())
    with pytest.raises(BackendError, match=r"returned \[3, 1, 32\] in torch.float32; forward returns \[3, 4, 32\]"):
        last_logits(decoder, [1, 2, 3])


def test_each_layer_asks_for_its_own_attention() -> None:
    specs = attention_specs(dummy_decoder("gemma3_tiny").config, "bfloat16", "cpu")
    assert [spec.sliding_window for spec in specs] == [32, 32, None]
    assert {(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale) for spec in specs} == {(4, 1, 32, 0.25)}


@pytest.mark.parametrize("cap", [None, 0.01])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make_ops", [TorchOps, native_ops])
def test_the_top1_tokens_without_the_other_logits(
    make_ops: Callable[[], Ops], dtype: str, cap: float | None
) -> None:
    """A cap that low makes the logits of many tokens equal: the first of them is the most likely one."""
    ops = make_ops()
    decoder = dummy_decoder("qwen3_tiny", dtype, ops, cap)
    ids, rows = torch.arange(20), torch.tensor([0, 7, 19])
    logits = decoder.forward(ids, view_of(decoder, 20, dtype), rows)
    values, indices = decoder.forward_top1(ids, view_of(decoder, 20, dtype), rows)
    expected = ops.topk(logits)
    assert torch.equal(values, expected.values)
    assert torch.equal(indices, expected.indices)
    none = decoder.forward_top1(ids, view_of(decoder, 20, dtype), rows[:0])
    assert none.values.shape == none.indices.shape == (0, 1)
