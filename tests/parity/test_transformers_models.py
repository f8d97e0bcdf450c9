"""Models that transformers computes over kvlab's cache: more families, every backend, and plans that do not hold.

features/models.feature has the families that are promised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvlab.attention.registry import attention_backends
from kvlab.config import KVConfig
from kvlab.core import FinishReason, Request, SamplingParams
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.executors.torch import build_decoder
from kvlab.engine.plan import EnginePlan
from kvlab.errors import BackendError
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.storage import KVStorage
from kvlab.lab.run.drive import drive
from tests.support.transformers_models import (
    MEMORIES,
    UNLIKE,
    Written,
    answers,
    engine_config,
    expected_tokens,
    served,
    write_model,
)

Write = Callable[[str], Written]
PAGES = MEMORIES["pages"].kv


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Each model once."""
    models: dict[str, Written] = {}

    def write(family: str) -> Written:
        if family not in models:
            models[family] = write_model(family, tmp_path_factory.mktemp(family))
        return models[family]

    return write


@pytest.mark.parametrize("family", UNLIKE)
def test_checkpoints_in_other_pieces_and_v_of_another_size(family: str, written: Write) -> None:
    model = written(family)
    expected = expected_tokens(model)
    for memory in ("shared pages", "so few pages that some are preempted"):
        assert served(model, MEMORIES[memory]) == expected


@pytest.mark.parametrize("family", ["gemma2", "mistral", "gpt_oss"])
def test_every_backend(family: str, written: Write) -> None:
    expected, tried = expected_tokens(written(family)), 0
    for backend, kind in attention_backends().items():
        if backend == "triton" or (family, backend) == ("gemma2", "sdpa"):
            continue
        if family == "gpt_oss" and not kind().takes_sinks:
            with pytest.raises(BackendError, match="computes no attention sinks"):
                plan_engine(engine_config(written(family).directory, PAGES, backend))
            continue
        config = engine_config(written(family).directory, PAGES, backend, max_batch_size=4)
        assert answers(build_engine(plan_engine(config))) == expected, backend
        tried += 1
    assert tried >= 3


def test_a_backend_without_soft_caps_is_refused(written: Write) -> None:
    with pytest.raises(BackendError, match="PyTorch's attention has no soft cap"):
        plan_engine(engine_config(written("gemma2").directory, PAGES, "sdpa"))


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_family_that_both_know_gives_equal_tokens(dtype: str, written: Write) -> None:
    directory = written("qwen3").directory
    kv = KVConfig(dtype=dtype, block_size=8, num_blocks=80)
    theirs, ours = (engine_config(directory, kv, implementation=name) for name in ("transformers", "auto"))
    plans = plan_engine(theirs), plan_engine(ours)
    assert [plan.chosen["kernels"] == "transformers" for plan in plans] == [True, False]
    assert answers(build_engine(plans[0])) == answers(build_engine(plans[1]))


class TestAttentionThatIsNotAsPlanned:
    """A defect of the plan is an error, rather than other tokens."""

    @pytest.fixture
    def plan(self, written: Write) -> EnginePlan:
        return plan_engine(engine_config(written("mistral").directory, PAGES))

    def test_another_window(self, plan: EnginePlan) -> None:
        kernels = plan.computed_by
        specs = tuple(replace(spec, sliding_window=None) for spec in kernels.specs)
        engine = build_engine(replace(plan, kernels=kernels._replace(specs=specs)))
        record = drive(engine, [Request("r", (1, 2, 3), SamplingParams(max_tokens=2))]).records[0]
        assert record.finish_reason is FinishReason.FAILED
        assert "mistral: attention was planned as LayerCall(layer=0," in str(record.error)
        assert "window=None" in str(record.error)
        assert "window=16" in str(record.error)

    def test_another_shape(self, plan: EnginePlan, monkeypatch: pytest.MonkeyPatch) -> None:
        kind = type(plan.computed_by.attention)
        monkeypatch.setattr(kind, "forward", lambda self, q, view, layer, spec: q[:, :1])
        record = drive(build_engine(plan), [Request("r", (1, 2, 3), SamplingParams(max_tokens=2))]).records[0]
        assert "returned [3, 1, 16] in torch.float32; forward returns [3, 4, 16]" in str(record.error)

    @pytest.mark.parametrize("kept", [0, 2])
    def test_layers_that_do_not_call_it(self, plan: EnginePlan, kept: int) -> None:
        model: Any = build_decoder(plan)
        model._model.config.num_hidden_layers = kept
        storage = KVStorage(plan.model.kv_spec("float32"), 4, 8)
        view = (pool := PagedKVCachePool(4, 8, 32, storage)).view([pool.allocate_slot(2)], [2])
        with pytest.raises(BackendError, match=f"attention was called in {kept} of 3 layers"):
            model.forward(torch.tensor([1, 2]), view, torch.tensor([1]))
