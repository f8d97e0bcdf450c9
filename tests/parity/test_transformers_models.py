"""Models that transformers computes over kvlab's cache give transformers' own greedy tokens, in float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from kvlab.attention.registry import attention_backends
from kvlab.config import KVConfig
from kvlab.core import FinishReason, Request, SamplingParams
from kvlab.engine.build import EnginePlan, build_engine, plan_engine
from kvlab.engine.engine import Engine
from kvlab.engine.executors.torch import build_decoder
from kvlab.errors import BackendError
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.storage import KVStorage
from kvlab.lab.drive import drive
from tests.support.transformers_models import FAMILIES, UNLIKE, VOCAB, Written, engine_config, write_model

Write = Callable[[str], Written]
Expected = Callable[[str], list[list[int]]]
_OUTPUT = 10


def _prompts() -> list[tuple[int, ...]]:
    """Three with a common beginning, and others, shorter and longer than the windows of the models."""
    draw = random.Random(0)
    common = draw.choices(range(VOCAB), k=24)
    lengths = [(common, 1), (common, 9), ([], 5), (common, 20), ([], 33), ([], 50)]
    return [tuple(start + draw.choices(range(VOCAB), k=own)) for start, own in lengths]


PROMPTS = _prompts()


class Memory(NamedTuple):
    """A cache, and a sign that what it is for has happened."""

    kv: KVConfig
    happened: Callable[[Any], Any] = lambda stats: True


MEMORIES = {
    "contiguous slots": Memory(KVConfig("contiguous")),
    "pages": Memory(KVConfig(block_size=8, num_blocks=80, prefix_sharing=False)),
    "shared pages": Memory(KVConfig(block_size=4, num_blocks=160), lambda stats: stats.hit_tokens >= 40),
    "preempted": Memory(
        KVConfig(block_size=4, num_blocks=17, prefix_sharing=False), lambda stats: stats.preemptions > 0
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Each model once, with the tokens that transformers itself gives."""
    models: dict[str, Written] = {}

    def write(family: str) -> Written:
        if family not in models:
            models[family] = write_model(family, tmp_path_factory.mktemp(family))
        return models[family]

    return write


@pytest.fixture(scope="module")
def expected(written: Write) -> Expected:
    found: dict[str, list[list[int]]] = {}

    def tokens(family: str) -> list[list[int]]:
        if family not in found:
            found[family] = [written(family).greedy(prompt, _OUTPUT) for prompt in PROMPTS]
            assert len(set(map(tuple, found[family]))) == len(PROMPTS)  # the model does listen to its prompt
        return found[family]

    return tokens


def served(engine: Engine) -> list[list[int]]:
    """The answers to all prompts at once; prompts are cut into chunks."""
    params = SamplingParams(max_tokens=_OUTPUT, ignore_eos=True)
    requests = [Request(f"r{index}", prompt, params) for index, prompt in enumerate(PROMPTS)]
    return [list(record.output_token_ids) for record in drive(engine, requests).records]


@pytest.mark.parametrize(
    ("family", "memory"), [*product(FAMILIES, MEMORIES), *product(UNLIKE, ["shared pages", "preempted"])]
)
def test_greedy_tokens(
    family: str, memory: str, written: Write, expected: Callable[[str], list[list[int]]]
) -> None:
    kv, happened = MEMORIES[memory]
    config = engine_config(
        written(family).directory, kv, max_batch_size=4, max_batched_tokens=28, admission_reserve=0.0
    )
    engine = build_engine(plan_engine(config))
    assert served(engine) == expected(family)
    assert happened(engine.stats())


@pytest.mark.parametrize("backend", [name for name in attention_backends() if name != "triton"])
@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_every_backend(
    family: str, backend: str, written: Write, expected: Callable[[str], list[list[int]]]
) -> None:
    config = engine_config(written(family).directory, MEMORIES["pages"].kv, backend, max_batch_size=4)
    if (family, backend) == ("gemma2", "sdpa"):
        with pytest.raises(BackendError, match="PyTorch's attention has no soft cap"):
            plan_engine(config)
        return
    assert served(build_engine(plan_engine(config))) == expected(family)


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_family_that_both_know_gives_equal_tokens(dtype: str, written: Write) -> None:
    directory = written("qwen3").directory
    kv = KVConfig(dtype=dtype, block_size=8, num_blocks=80)
    theirs, ours = (engine_config(directory, kv, implementation=name) for name in ("transformers", "auto"))
    plans = plan_engine(theirs), plan_engine(ours)
    assert [plan.chosen["kernels"] == "transformers" for plan in plans] == [True, False]
    assert served(build_engine(plans[0])) == served(build_engine(plans[1]))


class TestAttentionThatIsNotAsPlanned:
    """A defect of the plan is an error, rather than other tokens."""

    @pytest.fixture
    def plan(self, written: Write) -> EnginePlan:
        return plan_engine(engine_config(written("mistral").directory, MEMORIES["pages"].kv))

    def test_another_window(self, plan: EnginePlan) -> None:
        kernels = plan.computed_by
        specs = tuple(replace(spec, sliding_window=None) for spec in kernels.specs)
        engine = build_engine(replace(plan, kernels=kernels._replace(specs=specs)))
        record = drive(engine, [Request("r", (1, 2, 3), SamplingParams(max_tokens=2))]).records[0]
        assert record.finish_reason is FinishReason.FAILED
        assert "mistral: attention was planned as LayerCall(layer=0," in str(record.error)
        assert "window=None" in str(record.error)
        assert "window=16" in str(record.error)

    @pytest.mark.parametrize("kept", [0, 2])
    def test_layers_that_do_not_call_it(self, plan: EnginePlan, kept: int) -> None:
        model: Any = build_decoder(plan)
        model._model.config.num_hidden_layers = kept
        storage = KVStorage(plan.model.kv_spec("float32"), 4, 8)
        view = (pool := PagedKVCachePool(4, 8, 32, storage)).view([pool.allocate_slot(2)], [2])
        with pytest.raises(BackendError, match=f"attention was called in {kept} of 3 layers"):
            model.forward(torch.tensor([1, 2]), view, torch.tensor([1]))
