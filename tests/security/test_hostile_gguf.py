"""GGUF files that are broken, or made to break their reader: each costs a sentence, and little memory and time."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kvlab.config import ModelConfig
from kvlab.errors import ConfigError, KvlabError, WeightsError
from kvlab.models.families import decoder_config
from kvlab.models.gguf import TYPES, read_gguf
from kvlab.models.weight_sources import open_weights
from tests.support.gguf_files import add_value, close, write_gguf
from tests.support.reference_models import make_model

Header = Callable[..., bytes]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_model("qwen2", 0, tmp_path_factory.mktemp("model")).reference


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, reference: Any) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(reference, path)
    return path.read_bytes()


def load(path: Path) -> None:
    """Everything that is read of a model."""
    config = decoder_config(ModelConfig(name="file", family=None, path=str(path), weights=None, max_seq_len=16))
    weights = open_weights(str(path), torch.float32, "cpu")
    weights.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(*values: bytes, tensors: bytes = b"", num_tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, len(values)) + b"".join(values) + tensors


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


BROKEN = {
    "empty": (b"", "is no GGUF file"),
    "another format": (b"PK\3\4" + bytes(100), "is no GGUF file"),
    "version 1": (header(version=1), "is of version 1; GGUF of versions 2 and 3 is read, little-endian"),
    "big-endian": (header(version=3 << 24), "is big-endian"),
    "more keys than bytes": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "is cut off: it ends within its metadata"),
    "more tensors than bytes": (header(num_tensors=2**60), "is cut off"),
    "a text of exabytes": (header(struct.pack("<Q", 2**62) + b"a"), "is cut off"),
    "an array of exabytes": (
        header(entry("a", 9, struct.pack("<IQ", 0, 2**62))),
        "has an array of 4611686018427387904 values",
    ),
    "arrays in arrays": (header(entry("a", 9, struct.pack("<IQ", 9, 1))), "values of type 9, which no model needs"),
    "no such type": (header(entry("a", 13, b"")), "a value of type 13, which GGUF does not know"),
    "no UTF-8": (header(entry("a", 8, struct.pack("<Q", 1) + b"\xff")), "a text that is not UTF-8"),
    "a key twice": (header(*[entry("a", 7, b"\1")] * 2), "has the key a twice"),
    "alignment": (header(entry("general.alignment", 4, struct.pack("<I", 0))), "general.alignment=0"),
    "a tensor of nine dimensions": (
        header(tensors=tensor("a", (1,) * 9, 0), num_tensors=1),
        "has the tensor a of 9 dimensions; from 1 to 4",
    ),
    "a tensor without rows": (header(tensors=tensor("a", (4, 0), 0), num_tensors=1), "not whole blocks of F32"),
    "half a block": (header(tensors=tensor("a", (40, 2), 3), num_tensors=1), "not whole blocks of Q4_1"),
    "a tensor of exabytes": (
        header(tensors=tensor("a", (2**31, 2**31), 0), num_tensors=1),
        "is cut off: tensor a ends beyond it; fetch it again",
    ),
    "a tensor twice": (
        header(tensors=2 * tensor("a", (1,), 0), num_tensors=2) + bytes(64),
        "has the tensor a twice",
    ),
    "a type that is not dequantised": (
        header(tensors=tensor("a", (256,), 19), num_tensors=1),
        f"stores tensor a as IQ1_S; dequantised: {', '.join(TYPES)}",
    ),
    "a type that nobody knows": (header(tensors=tensor("a", (256,), 99), num_tensors=1), "tensor a as type 99"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_name(name: str, tmp_path: Path) -> None:
    content, reason = BROKEN[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"model.path={path}: ") + f".*{re.escape(reason)}"):
        load(path)
    with pytest.raises(WeightsError, match=re.escape(reason)):
        open_weights(str(path), torch.float32, "cpu")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": (
        {"general.architecture": "mamba"},
        "has general.architecture='mamba'; known: llama, qwen2",
    ),
    "no width": ({"qwen2.embedding_length": None}, "has no qwen2.embedding_length, which a decoder needs"),
    "a text as width": ({"qwen2.embedding_length": "64"}, "in a width of 64"),
    "no heads": ({"qwen2.attention.head_count": 0}, "has 0 heads"),
    "experts": ({"qwen2.expert_count": 8}, "has qwen2.expert_count=8; no mixture of experts is known"),
    "other V": ({"qwen2.attention.value_length": 8}, "heads of 16 numbers in K and 8 in V; they have to be equal"),
    "half rotated": ({"qwen2.rope.dimension_count": 8}, "rotates 8 of 16 numbers of a head"),
    "yarn": ({"qwen2.rope.scaling.type": "yarn"}, "rope_type=yarn: unknown; known: default, linear, llama3"),
    "a part": ({"split.count": 2}, "is one of several files of a model; join them with llama-gguf-split --merge"),
    "an end outside": ({"tokenizer.ggml.eos_token_id": 512}, "eos_token_id=[512]: has to be null, or token ids"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_cannot_be_computed_is_refused(name: str, tmp_path: Path, reference: Any) -> None:
    values, reason = WRONG[name]
    path = tmp_path / "model.gguf"
    if "general.architecture" in values:
        writer = gguf.GGUFWriter(path, values["general.architecture"])
        add_value(writer, "mamba.block_count", 1)
        close(writer)
    else:
        write_gguf(reference, path, metadata=values)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load(path)


def test_other_rotary_factors_than_those_of_llama_3_1_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_model("llama", 0, tmp_path / "checkpoint").reference, path)  # its original context is 64
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight\) in another way than Llama 3\.1"):
        load(path)


def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, reference: Any) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(reference, path)
    stored = read_gguf(path).tensors["blk.0.ffn_up.weight"]
    with path.open("r+b") as file:
        file.seek(stored.offset)
        file.write(np.array([np.inf], np.float32).tobytes())
    weights = open_weights(str(path), torch.float32, "cpu")
    with pytest.raises(WeightsError, match=r"tensor blk\.0\.ffn_up\.weight holds numbers that are not finite"):
        weights.take("model.layers.0.mlp.up_proj.weight", (128, 64))


def test_missing_misshapen_and_extra_tensors_are_named(tmp_path: Path, reference: Any) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(reference, path)
    weights = open_weights(str(path), torch.float32, "cpu")
    with pytest.raises(WeightsError, match=r"tensor blk\.7\.ffn_up\.weight \[128, 64\] is missing"):
        weights.take("model.layers.7.mlp.up_proj.weight", (128, 64))
    with pytest.raises(WeightsError, match=r"output_norm\.weight has shape \[64\], the model needs \[65\]"):
        weights.take("model.norm.weight", (65,))
    with pytest.raises(WeightsError, match=r"has no place for tensor\(s\) blk\.0\.attn_k\.bias, .* more"):
        weights.finish()


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "model.gguf"
    cuts = random.Random(0).sample(range(len(sound)), 150)
    for cut in (*range(0, 64, 7), *cuts, len(sound) - 40):
        path.write_bytes(sound[:cut])
        with pytest.raises(ConfigError, match=r"is cut off|is no GGUF file"):
            load(path)


def test_a_file_with_any_byte_changed_is_loaded_or_refused(tmp_path: Path, sound: bytes) -> None:
    path, chance = tmp_path / "model.gguf", random.Random(0)
    refused = 0
    for _ in range(200):
        content = bytearray(sound)
        for _ in range(chance.choice((1, 1, 4))):
            content[chance.randrange(3500)] = chance.choice((0, 1, 127, 255, chance.randrange(256)))
        path.write_bytes(content)
        try:
            load(path)
        except KvlabError:
            refused += 1
    assert refused > 50
