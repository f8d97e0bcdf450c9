"""All layers in one native call give what they give one by one, to the last bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, pairwise

import pytest
import torch

from kvlab.attention.base import AttentionBackend
from kvlab.attention.registry import select_backend
from kvlab.errors import KernelError
from kvlab.kv.view import CacheView
from kvlab.lab.run.profile import Part, Profiler, timed, timed_ops
from kvlab.models.config import attention_specs
from kvlab.models.decoder import Decoder
from kvlab.models.layers import AttentionPart, MlpPart, ResidualNorm
from kvlab.models.ops.base import LayerPart, StepContext
from kvlab.models.ops.cpu_layers import NativeStack
from kvlab.models.ops.cpu_ops import CpuOps
from kvlab.models.weights import DummyWeights
from tests.support.reference_models import (
    VARIANTS,
    TinyModel,
    logits_in_steps,
    make_model,
    random_texts,
    read_decoder,
)

TEXTS = random_texts(41, 80, 20)
STEPS = [[40, 17, 0], [1, 50, 19], [0, 12, 1], [0, 1, 0]]


class OneByOne(CpuOps):
    """Native ops that leave the layers to Python."""

    def stack(self, layers: Sequence[Sequence[LayerPart]], attention: AttentionBackend) -> None:
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


def logits(model: TinyModel, ops: CpuOps, cache_dtype: str, dtype: str = "bfloat16") -> torch.Tensor:
    decoder = read_decoder(model.config, model.directory, dtype, ops)
    assert isinstance(decoder._stack, NativeStack) == (type(ops) is CpuOps)
    return torch.cat(logits_in_steps(decoder, TEXTS, STEPS, cache_dtype))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "weights"),
    [
        ("bfloat16", "bfloat16", "auto"),
        ("bfloat16", "int8+fp8_e5m2", "plain"),
        ("bfloat16", "bfloat16+int8", "int8"),
        ("bfloat16", "bfloat16", "int8_w8a8"),
        ("float32", "float32", "auto"),
        ("float32", "int8+float32", "auto"),
    ],
)
def test_the_same_logits(
    models: Callable[[str], TinyModel], variant: str, dtype: str, cache_dtype: str, weights: str
) -> None:
    model = models(variant)
    found = logits(model, CpuOps(weights=weights), cache_dtype, dtype)
    assert found.isfinite().all()
    assert torch.equal(found, logits(model, OneByOne(weights=weights), cache_dtype, dtype))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [[], [79], [3, 41, 40], [*range(64)], [*range(65)]])
def test_the_same_logits_where_few_rows_are_wanted(
    models: Callable[[str], TinyModel], variant: str, rows: list[int]
) -> None:
    """The last layer then leaves out the others."""
    model = models(variant)
    decoder = read_decoder(model.config, model.directory, "bfloat16", CpuOps())
    (every,) = logits_in_steps(decoder, TEXTS[1:2], [[80]], "bfloat16")
    few = RowsAlone(decoder, rows)
    logits_in_steps(few, TEXTS[1:2], [[80]], "bfloat16")  # type: ignore[arg-type]
    assert few.found.isfinite().all()
    assert torch.equal(few.found, every[rows])


class RowsAlone:
    """A decoder that is asked for some rows of a batch, and keeps their logits."""

    def __init__(self, decoder: Decoder, rows: list[int]) -> None:
        self.config, self._decoder, self._rows = decoder.config, decoder, torch.tensor(rows, dtype=torch.int64)

    def forward(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> torch.Tensor:
        self.found = self._decoder.forward(token_ids, view, self._rows)
        return self.found.new_zeros(len(rows), 1)


def test_only_where_everything_is_native(models: Callable[[str], TinyModel]) -> None:
    model = models("qwen3")
    specs = attention_specs(model.config, "bfloat16", "cpu")
    weights = DummyWeights(torch.bfloat16, "cpu")
    other = select_backend(specs, "sdpa")
    assert Decoder(model.config, weights, other, specs, 64, CpuOps())._stack is None


@dataclass(frozen=True)
class Doubled:
    """A part that no native layer knows."""

    def __call__(
        self, residual: torch.Tensor, x: torch.Tensor, step: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return residual, 2 * x


class OtherLayers(CpuOps):
    """Native ops for a decoder whose layers have other parts."""

    def __init__(self, change: Callable[[list[LayerPart]], list[LayerPart]]) -> None:
        super().__init__()
        self._change = change

    def stack(self, layers: Sequence[Sequence[LayerPart]], attention: AttentionBackend) -> NativeStack | None:
        assert isinstance(layers, list)
        layers[:] = [self._change([*layer]) for layer in layers]
        return super().stack(layers, attention)


def test_a_part_that_is_unknown_runs_one_by_one(models: Callable[[str], TinyModel]) -> None:
    """And is computed: to double what attention and MLP give changes the logits."""
    model = models("qwen3")
    read = partial(read_decoder, model.config, model.directory, "bfloat16")
    plain = read(OneByOne())
    other = read(OtherLayers(lambda parts: [parts[0], parts[1], Doubled(), *parts[2:], Doubled()]))
    assert other._stack is None
    found, expected = (torch.cat(logits_in_steps(decoder, TEXTS, STEPS, "bfloat16")) for decoder in (other, plain))
    assert found.isfinite().all()
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("variant", ["qwen3", "gemma3"])
def test_what_attention_and_mlp_give_is_part_of_a_sum(
    models: Callable[[str], TinyModel], variant: str, dtype: str
) -> None:
    """Of two processes that have the same: all is doubled, also where few rows are left."""
    model = models(variant)
    read = partial(read_decoder, model.config, model.directory, dtype)
    after = {AttentionPart, MlpPart}
    doubled = read(
        OtherLayers(lambda parts: [*chain(*([p, Doubled()] if type(p) in after else [p] for p in parts))])
    )
    summed = read(CpuOps())
    assert doubled._stack is None
    assert isinstance(summed._stack, NativeStack)
    summed._stack.sum_with(lambda x: x.mul_(2))
    for texts, steps in ((TEXTS, STEPS), (TEXTS[1:2], [[80]])):
        found, expected = (torch.cat(logits_in_steps(each, texts, steps, dtype)) for each in (summed, doubled))
        assert torch.equal(found, expected)
    few, all_rows = RowsAlone(summed, [3, 41]), RowsAlone(doubled, [3, 41])
    for each in (few, all_rows):
        logits_in_steps(each, TEXTS[1:2], [[80]], dtype)  # type: ignore[arg-type]
    assert torch.equal(few.found, all_rows.found)


def test_a_sum_that_fails_ends_the_step(models: Callable[[str], TinyModel]) -> None:
    decoder = read_decoder(models("qwen3").config, models("qwen3").directory, "bfloat16", CpuOps())
    calls: list[int] = []

    def add(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        if len(calls) == 2:
            raise ConnectionError("a rank has ended")
        return x

    assert decoder._stack is not None
    decoder._stack.sum_with(add)
    with pytest.raises(ConnectionError, match="a rank has ended"):
        logits_in_steps(decoder, [[1, 2, 3]], [[3]], "bfloat16")
    assert len(calls) == 2
    logits_in_steps(decoder, [[1, 2, 3]], [[3]], "bfloat16")  # and no other


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts[1:],  # attention without a norm ahead of it
        lambda parts: [*parts, parts[-1]],  # an MLP behind an MLP
        lambda parts: [parts[0], *parts],
        lambda parts: parts[:3],  # a norm that nothing reads
        lambda parts: [],
    ],
)
def test_another_order_of_parts_is_not_stacked(
    models: Callable[[str], TinyModel], change: Callable[[list[LayerPart]], list[LayerPart]]
) -> None:
    model = models("qwen3")
    assert read_decoder(model.config, model.directory, "bfloat16", OtherLayers(change))._stack is None


def test_layers_of_one_kind_of_part_each_are_stacked(models: Callable[[str], TinyModel]) -> None:
    """A layer without attention, say: the order of parts counts, and not how they are grouped."""
    model = models("qwen3")
    read = partial(read_decoder, model.config, model.directory, "bfloat16")

    def without_attention(parts: list[LayerPart]) -> list[LayerPart]:
        return [parts[0], *parts[3:]] if isinstance(parts[0], ResidualNorm) else parts

    native, other = read(OtherLayers(without_attention)), read(OtherLayers(without_attention))
    assert isinstance(native._stack, NativeStack)
    other._stack = None
    found, expected = (torch.cat(logits_in_steps(decoder, TEXTS, STEPS, "bfloat16")) for decoder in (native, other))
    assert torch.equal(found, expected)


def test_its_parts_are_timed(models: Callable[[str], TinyModel]) -> None:
    config, profiler = models("gemma3").config, Profiler()
    specs = attention_specs(config, "bfloat16", "cpu")
    attention = timed(select_backend(specs), profiler, forward=Part.ATTENTION)
    weights = DummyWeights(torch.bfloat16, "cpu", norm_weight=config.initial_norm_weight)
    decoder = Decoder(config, weights, attention, specs, 64, timed_ops(CpuOps(), profiler))
    start = profiler.now()
    logits_in_steps(decoder, [[1, 2, 3]], [[3]], "bfloat16")
    spans = profiler._spans
    layers = config.num_layers
    # The last norm and the output layer come behind the layers.
    assert Counter(part for part, _, _ in spans) == {
        Part.ATTENTION: layers,
        Part.LINEAR: 4 * layers + 1,
        Part.ELEMENTWISE: 5 * layers + 1,
    }
    assert start <= spans[0][1]
    assert all(begin <= end for _, begin, end in spans)
    assert all(one[2] <= other[1] for one, other in pairwise(spans))
    assert spans[-1][2] <= profiler.now()
