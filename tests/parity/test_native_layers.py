"""All layers in one native call give what they give one by one, to the last bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import pytest
import torch

from kvlab.attention.base import AttentionBackend
from kvlab.attention.registry import default_registry
from kvlab.errors import KernelError
from kvlab.lab.profile import Part, Profiler, ProfilingAttention, ProfilingOps
from kvlab.models.decoder import Decoder, attention_specs
from kvlab.models.ops.base import LayerParts
from kvlab.models.ops.cpu_layers import NativeStack
from kvlab.models.ops.cpu_ops import CpuOps
from kvlab.models.weights import DummyWeights
from tests.parity.tiny_models import VARIANTS, TinyModel, logits_in_steps, make_model, random_texts, read_decoder

TEXTS = random_texts(41, 80, 20)
STEPS = [[40, 17, 0], [1, 50, 19], [0, 12, 1], [0, 1, 0]]


class OneByOne(CpuOps):
    """Native ops that leave the layers to Python."""

    def stack(self, layers: Sequence[LayerParts], attention: AttentionBackend) -> None:
        return None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    try:
        CpuOps()
    except KernelError as error:
        pytest.skip(str(error))

    @cache
    def make(variant: str) -> TinyModel:
        return make_model(variant, 0, tmp_path_factory.mktemp("model"))

    return make


def logits(model: TinyModel, ops: CpuOps, cache_dtype: str) -> torch.Tensor:
    decoder = read_decoder(model.config, model.directory, "bfloat16", ops)
    assert isinstance(decoder._stack, NativeStack) == (type(ops) is CpuOps)
    return torch.cat(logits_in_steps(decoder, TEXTS, STEPS, cache_dtype))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("cache_dtype", "int8_weights"), [("bfloat16", False), ("int8", False), ("bfloat16", True)]
)
def test_the_same_logits(
    models: Callable[[str], TinyModel], variant: str, cache_dtype: str, int8_weights: bool
) -> None:
    model = models(variant)
    found = logits(model, CpuOps(int8_weights=int8_weights), cache_dtype)
    assert found.isfinite().all()
    assert torch.equal(found, logits(model, OneByOne(int8_weights=int8_weights), cache_dtype))


def test_only_where_everything_is_native(models: Callable[[str], TinyModel]) -> None:
    model = models("qwen3")
    assert read_decoder(model.config, model.directory, "float32", CpuOps())._stack is None
    specs = attention_specs(model.config, "bfloat16", "cpu")
    weights = DummyWeights(torch.bfloat16, "cpu")
    other = default_registry().select(specs, "sdpa")
    assert Decoder(model.config, weights, other, specs, 64, CpuOps())._stack is None


def test_its_parts_are_timed(models: Callable[[str], TinyModel]) -> None:
    config, profiler = models("gemma3").config, Profiler()
    specs = attention_specs(config, "bfloat16", "cpu")
    attention = ProfilingAttention(default_registry().select(specs), profiler)
    weights = DummyWeights(torch.bfloat16, "cpu", norm_weight=config.initial_norm_weight)
    decoder = Decoder(config, weights, attention, specs, 64, ProfilingOps(CpuOps(), profiler))
    start = profiler.now()
    logits_in_steps(decoder, [[1, 2, 3]], [[3]], "bfloat16")
    spans = profiler._spans
    layers = config.num_layers
    # The last norm and the output layer come behind the layers.
    assert Counter(part for part, _, _ in spans) == {
        Part.ATTENTION: layers,
        Part.LINEAR: 4 * layers + 1,
        Part.ELEMENTWISE: 4 * layers + 1,
    }
    assert start <= spans[0][1]
    assert all(begin <= end for _, begin, end in spans)
    assert all(one[2] <= other[1] for one, other in pairwise(spans))
    assert spans[-1][2] <= profiler.now()
