"""Decoders that transformers computes, on simulated devices: what is planned of them, and what is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlab.cli import capacity
from kvlab.engine.build import plan_engine
from kvlab.errors import ConfigError
from kvlab.planning.devices import plan_on_devices
from tests.support.commands import call
from tests.support.plans import composed


def test_a_mixture_that_transformers_computes_is_planned_and_not_timed(tmp_path: Path) -> None:
    values = {
        "model_type": "olmoe",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    own = ("model=checkpoint", f"model.path={tmp_path}", "model.name=mine", "workload.num_requests=1")
    config = composed("executor=simulated", "hardware=h100_sxm", "executor.timing=roofline", *own)
    assert config.hardware is not None
    assert plan_on_devices(config, config.hardware).left(2**30) > 0
    with pytest.raises(ConfigError, match=r"a mixture of experts \(olmoe\), .* not timed, those of glm4_moe"):
        plan_engine(config)
    planned = call(capacity.main, *own, "hardware=h100_sxm")
    assert planned.code == 0
    assert "kvlab advise" not in planned.output  # which would be refused as well
    divided = composed("executor=simulated", "hardware=h100_sxm", "executor.expert_parallel=2", *own)
    with pytest.raises(ConfigError, match="those of olmoe are divided by"):
        plan_engine(divided)


def test_layers_with_other_products_are_not_timed_by_those_that_were_measured(tmp_path: Path) -> None:
    pytest.importorskip("aiconfigurator_core", reason="pip install 'kvlab[silicon]' for the tables")
    shapes = {
        "vocab_size": 50_432,
        "hidden_size": 4_096,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "intermediate_size": 16_384,
        "max_position_embeddings": 2_048,
    }
    own = ("executor=simulated", "hardware=h100_sxm", "model=checkpoint", f"model.path={tmp_path}")
    for family, timing in (("mistral", "silicon"), ("gpt_neox", "roofline")):  # whose MLP has no gate
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **shapes}), encoding="utf-8")
        assert str(plan_engine(composed(*own)).chosen["timing"]).startswith(timing)
    with pytest.raises(ConfigError, match="its layers have others"):
        plan_engine(composed(*own, "executor.timing=silicon"))
