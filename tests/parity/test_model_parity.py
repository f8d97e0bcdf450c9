"""Logits of each family against transformers, in float32: prefill, chunks, decode at mixed positions.

The longest texts go far beyond the sliding windows of 32 tokens and Llama's original context of 64.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from kvlab.models.ops import select_ops
from kvlab.models.ops.base import Ops
from tests.support.reference_models import (
    VARIANTS,
    TinyModel,
    in_chunks,
    logits_in_steps,
    make_model,
    random_texts,
    read_decoder,
)

TOLERANCE = 5e-5  # the largest difference that was found is 2.2e-5, of logits up to 10
MakeModel = Callable[[str, int], TinyModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Each model is made once; those of the second seed are stored in shards."""

    @cache
    def make(variant: str, seed: int) -> TinyModel:
        return make_model(variant, seed, tmp_path_factory.mktemp("model"), "100KB" if seed else "1GB")

    return make


def make_ops(name: str) -> Ops:
    if name == "triton":
        from kvlab.models.ops.triton_ops import TritonOps

        return TritonOps()
    ops = select_ops(torch.float32, "cpu", kernels=name == "native")
    if not ops.name.startswith(name):
        pytest.skip("no C++ compiler")
    return ops


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "gemma3 capped scores":
        # Gemma3Attention of transformers 5 reads the cap and does not hand it to the attention it calls.
        from transformers.models.gemma3 import modeling_gemma3  # which takes a second

        cap = VARIANTS[name][1]["attn_logit_softcapping"]
        plain: Any = modeling_gemma3.eager_attention_forward
        monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", partial(plain, softcap=cap))
    return name


@pytest.fixture
def model(models: MakeModel, variant: str) -> TinyModel:
    """Every other variant is of the second seed."""
    return models(variant, list(VARIANTS).index(variant) % 2)


@pytest.mark.parametrize("seed", [0, 1])
def test_prefill(models: MakeModel, variant: str, seed: int) -> None:
    model = models(variant, seed)
    texts = random_texts(1, 16, 17, 33, 90, 400)
    assert model.error(texts, [[len(text) for text in texts]]) < TOLERANCE


@pytest.mark.parametrize("size", [7, 16, 50])
def test_prefill_in_chunks(model: TinyModel, size: int) -> None:
    texts = random_texts(50, 31, 200)
    assert model.error(texts, in_chunks(texts, size)) < TOLERANCE


def test_decode_at_mixed_positions(model: TinyModel) -> None:
    before = [3, 16, 31, 32, 63, 300]
    texts = random_texts(*[length + 12 for length in before])
    assert model.error(texts, [before, *[[1] * 6] * 12]) < TOLERANCE


@pytest.mark.parametrize(("ops", "seed"), [("native", 0), ("triton", 1)])
def test_with_kernels(models: MakeModel, variant: str, ops: str, seed: int) -> None:
    """All at once, with what is not attention computed by kernels; those for a GPU are interpreted."""
    model = models(variant, seed)
    decoder = read_decoder(model.config, model.directory, ops=make_ops(ops))
    few = ops == "triton"
    texts = random_texts(6, 5, 3, 1) if few else random_texts(41, 37, 20, 1)
    steps = [[5, 2, 0, 1], [1, 3, 3, 0]] if few else [[40, 17, 0, 1], [1, 20, 20, 0]]
    assert replace(model, decoder=decoder).error(texts, steps) < TOLERANCE


def test_prefill_and_decode_in_one_step(model: TinyModel) -> None:
    texts = random_texts(41, 80, 20)
    assert model.error(texts, [[40, 17, 0], [1, 50, 20], [0, 13, 0]]) < TOLERANCE


@pytest.mark.parametrize("ops", ["torch", "native"])
def test_rounds_less_than_transformers_in_bfloat16(models: MakeModel, variant: str, ops: str) -> None:
    """Norms of 1 + w, the rounded scale of embeddings and packed biases included. Our residual stream is not."""
    model, texts = models(variant, 0), random_texts(70, 20)
    exact = torch.cat([model.expected(text) for text in texts])
    decoder = read_decoder(model.config, model.directory, "bfloat16", make_ops(ops))
    ours = torch.cat(logits_in_steps(decoder, texts, in_chunks(texts, 40), "bfloat16"))
    rounded = replace(model, reference=deepcopy(model.reference).bfloat16())
    theirs = torch.cat([rounded.expected(text) for text in texts])
    assert (ours - exact).pow(2).mean() < 0.9 * (theirs - exact).pow(2).mean()
