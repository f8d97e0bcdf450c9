"""A GGUF file's tokenizer and configuration as files that transformers reads, for programs without GGUF."""

from __future__ import annotations

import json
from pathlib import Path

from kvlab.errors import TokenizerError
from kvlab.models.gguf import read_gguf
from kvlab.models.gguf_config import config_values
from kvlab.models.gguf_tokenizer import gguf_tokenizer, token_text


def tokenizer_files(path: Path) -> dict[str, str]:
    """The content of tokenizer.json, tokenizer_config.json and config.json, by name. Raises TokenizerError."""
    try:
        file = read_gguf(path)
        backend, config = gguf_tokenizer(file), config_values(file)
    except ValueError as error:
        raise TokenizerError(f"{path} {error}") from error
    tokens = {f"{name}_token": text for name in ("bos", "eos") if (text := token_text(file, name)) is not None}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "chat_template": file.metadata.get("tokenizer.chat_template"),
        **tokens,
    }
    return {
        "tokenizer.json": backend.to_str(),
        "tokenizer_config.json": _json(settings),
        "config.json": _json(config),
    }


def _json(values: dict[str, object]) -> str:
    return json.dumps({name: value for name, value in values.items() if value is not None}, indent=2) + "\n"
