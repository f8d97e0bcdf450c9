"""A config.json that leaves out what memory depends on is refused, unless its family has a rule for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlab.errors import ConfigError
from kvlab.lab.model_file import check_model_file

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def check(folder: Path, values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    check_model_file(file)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_a_whole_file_is_fine(tmp_path: Path, family: str) -> None:
    check(tmp_path, {"model_type": family, **SIZES})


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3_text"])
def test_kv_heads_are_not_guessed(tmp_path: Path, family: str) -> None:
    values = {"model_type": family, **SIZES, "num_key_value_heads": None}
    with pytest.raises(ConfigError, match=f"this {family} leaves out num_key_value_heads"):
        check(tmp_path, values)


def test_an_old_llama_has_as_many_kv_heads_as_query_heads(tmp_path: Path) -> None:
    older = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
    check(tmp_path, {"model_type": "llama", **older})


def test_a_multimodal_file_is_read_where_its_language_model_is(tmp_path: Path) -> None:
    text = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    check(tmp_path, {"model_type": "gemma3", "text_config": text})
    with pytest.raises(ConfigError, match="text_config of this gemma3 leaves out hidden_size"):
        check(tmp_path, {"model_type": "gemma3", "text_config": {"intermediate_size": 1, "num_hidden_layers": 1}})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "has no model_type"),
        ([1], "holds no JSON object"),
        ({"model_type": "gpt2"}, "this gpt2 leaves out vocab_size, n_embd, n_layer, n_head; add"),
        ({"model_type": "mistral", **SIZES, "num_key_value_heads": None}, "leaves out num_key_value_heads"),
        ({"model_type": "qwen3"}, "leaves out vocab_size, hidden_size"),
        ({"model_type": "gemma3", "text_config": None}, "leaves out hidden_size"),
    ],
)
def test_what_is_no_model_says_so(tmp_path: Path, values: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check(tmp_path, values)


def test_a_file_that_is_no_json_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is no JSON that can be read"):
        check_model_file(tmp_path / "config.json")
