"""Checkpoints as strangers may write them, and odd ones that are sound."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.security.checkpoints import (
    CONFIG,
    EMBEDDING,
    INDEX,
    WEIGHTS,
    Mutation,
    described,
    described_as,
    header,
    in_shards,
    index_of,
    indexed,
    instead,
    stored,
    weights_of,
)

SECONDS = 20  # of a hang


ADDRESS_SPACE = 2 << 30  # bytes more than the process has mapped


NORM = "model.norm.weight"


SHAPE = [CONFIG["vocab_size"], CONFIG["hidden_size"]]


BYTES = 4 * SHAPE[0] * SHAPE[1]


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 2.0}


def entry(dtype: str = "F32", shape: object = SHAPE, end: int = BYTES, start: int = 0) -> str:
    """What a header says of the embedding."""
    return json.dumps({EMBEDDING: {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}})


def both(*mutations: Mutation) -> Mutation:
    return lambda directory: [mutate(directory) for mutate in mutations]


def endless(name: str) -> Mutation:
    """A FIFO that nobody writes to."""
    return instead(name, os.mkfifo)


def sparse(name: str, size: int) -> Mutation:
    """A file of so many bytes that takes no room on the disk."""
    return lambda directory: os.truncate(directory / name, size)


def twice_in_shards(directory: Path) -> None:
    indexed(directory, {"a": "model-00001.safetensors", "b": "model-00002.safetensors"})
    save_file({NORM: torch.ones(CONFIG["hidden_size"])}, directory / "model-00002.safetensors")


def pickled(directory: Path) -> None:
    torch.save(load_file(directory / WEIGHTS), directory / "pytorch_model.bin")
    (directory / WEIGHTS).unlink()


#: What is wrong with a config.json, how it becomes so, and what the refusal says.
CONFIGS: dict[str, tuple[Mutation, str]] = {
    "empty": (described(""), "is no JSON that can be read (Expecting value"),
    "null": (described("null"), "holds no JSON object"),
    "a list": (described("[1, 2]"), "holds no JSON object"),
    "a number": (described("17"), "holds no JSON object"),
    "cut off": (described(json.dumps(CONFIG)[:-9]), "is no JSON that can be read"),
    "not UTF-8": (described(b'{"model_type": "\xff\xfe"}'), "is no JSON that can be read ('utf-8' codec"),
    "nested deeply": (described("[" * 200_000), "is no JSON that can be read (nested too deeply)"),
    "objects nested deeply": (described('{"a":' * 200_000), "(nested too deeply)"),
    "a key with two values": (
        described(json.dumps(CONFIG)[:-1] + ', "vocab_size": 41}'),
        "the key vocab_size has two values",
    ),
    "a number of 10,000 digits": (
        described('{"vocab_size": 1' + "0" * 9_999 + "}"),
        "a whole number of 10000 digits",
    ),
    "a terabyte": (sparse("config.json", 1 << 40), "has 1099511627776 bytes, more than the 67108864 that are read"),
    "a folder": (instead("config.json", Path.mkdir), "config.json is not a regular file"),
    "a FIFO": (endless("config.json"), "config.json is not a regular file"),
    "a device": (instead("config.json", lambda file: file.symlink_to("/dev/zero")), "is not a regular file"),
    "a link that leads nowhere": (
        instead("config.json", lambda file: file.symlink_to("nowhere")),
        "config.json is not there",
    ),
    "a link to itself": (instead("config.json", lambda file: file.symlink_to(file)), "config.json cannot be read"),
    "gone": (instead("config.json", lambda _: None), "there is no config.json in this directory"),
    "no model type": (described("{}"), "model_type=null: unknown family; known: gemma3,"),
    "a list as model type": (described_as(model_type=["llama"]), "model_type=['llama']: unknown family"),
    "an unknown model type with code": (
        described_as(model_type="x", auto_map={"AutoConfig": "configuration_x.Config"}),
        "model_type=x: unknown family, and kvlab never runs the code that its auto_map names; known: gemma3, "
        "gemma3_text, llama, qwen2, qwen3, and the decoders of transformers ",
    ),
    "control characters": (described_as(model_type="\x1b[2J\n"), r"model_type=\x1b[2J\n: unknown family"),
    "half a character": (described_as(model_type="\ud800"), r"model_type=\ud800: unknown family"),
    "a long value": (described_as(model_type="x" * 10**6), "... (1,000,000 characters): unknown family"),
    "a list as text_config": (
        described_as(model_type="gemma3", text_config=[1]),
        "text_config=[1]: has to be an object",
    ),
    "NaN": (described_as(rms_norm_eps=float("nan")), "rms_norm_eps=nan: has to be a number above 0"),
    "infinity": (described_as(rms_norm_eps=float("inf")), "rms_norm_eps=inf: has to be a number above 0"),
    "an infinity of digits": (described('{"model_type": "llama", "rms_norm_eps": 1e999}'), "rms_norm_eps=inf: "),
    "a string as a number": (described_as(rms_norm_eps="1e-6"), "rms_norm_eps=1e-6: has to be a number above 0"),
    "a string as a count": (described_as(hidden_size="16"), "hidden_size=16: has to be a whole number"),
    "a fraction as a count": (described_as(hidden_size=16.5), "hidden_size=16.5: has to be a whole number"),
    "true as a count": (described_as(hidden_size=True), "hidden_size=True: has to be a whole number"),
    "no vocabulary": (described_as(vocab_size=0), "vocab_size=0: has to be a whole number of at least 1"),
    "a vocabulary of 10**12": (
        described_as(vocab_size=10**12),
        "vocab_size=1000000000000: has to be a whole number",
    ),
    "minus one layer": (described_as(num_hidden_layers=-1), "num_hidden_layers=-1: has to be a whole number"),
    "10**12 layers": (described_as(num_hidden_layers=10**12), "num_hidden_layers=1000000000000: has to be"),
    "10**29 layers": (described_as(num_hidden_layers=10**29), "and at most 10000"),
    "no heads": (described_as(num_attention_heads=0), "num_attention_heads=0: has to be a whole number"),
    "heads that do not divide": (described_as(num_attention_heads=3), "num_attention_heads=3: does not divide"),
    "more KV heads than heads": (described_as(num_key_value_heads=4), "num_key_value_heads=4: does not divide"),
    "half a pair of channels": (described_as(head_dim=7), "head_dim=7: has to be even"),
    "no positions": (described_as(max_position_embeddings=0), "max_position_embeddings=0: has to be"),
    "an object as activation": (described_as(hidden_act={"a": 1}), "hidden_act={'a': 1}: unknown"),
    "a string as a flag": (described_as(attention_bias="no"), "attention_bias=no: has to be true or false"),
    "an end of text outside the vocabulary": (
        described_as(eos_token_id=40),
        "eos_token_id=40: has to be null, or token ids of the vocabulary, 0 to 39",
    ),
    "a negative end of text": (described_as(eos_token_id=[1, -1]), "eos_token_id=[1, -1]: has to be null"),
    "a word as end of text": (described_as(eos_token_id="</s>"), "eos_token_id=</s>: has to be null"),
    "lists as end of text": (described_as(eos_token_id=[[1]]), "eos_token_id=[[1]]: has to be null"),
    "a string as layer types": (
        described_as(layer_types="full_attention"),
        "layer_types=full_attention: has to be",
    ),
    "lists as layer types": (
        described_as(layer_types=[["full_attention"]]),
        "layer_types=[['full_attention']]: has",
    ),
    "more layer types than layers": (
        described_as(layer_types=["full_attention"] * 10**5),
        "names 100000 layers of num_hidden_layers=1",
    ),
    "a window of minus one": (
        described_as(use_sliding_window=True, sliding_window=-1),
        "sliding_window=-1: has to be a whole number",
    ),
    "a string as max_window_layers": (
        described_as(use_sliding_window=True, sliding_window=4, max_window_layers="1"),
        "max_window_layers=1: has to be a whole number of at least 0",
    ),
    "a soft cap of zero": (
        described_as(model_type="gemma3_text", attn_logit_softcapping=0),
        "attn_logit_softcapping=0: has to be a number above 0",
    ),
    "a list as rope scaling": (described_as(rope_scaling=[8]), "rope_scaling=[8]: has to be an object, or null"),
    "a list as rope type": (
        described_as(rope_parameters={"rope_type": ["default"]}),
        "rope_parameters.rope_type=['default']: unknown; known: default, linear, llama3",
    ),
    "a rope theta of 1e300": (
        described_as(rope_parameters={"rope_type": "default", "rope_theta": 1e300}),
        "rope_parameters.rope_theta=1e+300: rope_type=default needs a number above 0, from 1e-12 to 1e12",
    ),
    "a rope theta of 1e-300": (described_as(rope_theta=1e-300), "rope_theta=1e-300: rope_type=default needs"),
    "a rope factor of zero": (
        described_as(rope_scaling={"type": "linear", "factor": 0}),
        "rope_parameters.factor=0: rope_type=linear needs a number above 0",
    ),
    "equal rope frequencies": (
        described_as(rope_parameters={**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 4.0}),
        "rope_parameters.high_freq_factor=4.0: has to be above low_freq_factor=4.0",
    ),
    "a string as a kind's rope": (
        described_as(model_type="gemma3_text", rope_parameters={"sliding_attention": "default"}),
        "rope_parameters.sliding_attention=default: has to be an object",
    ),
}


#: The same of the weights.
FILES: dict[str, tuple[Mutation, str]] = {
    "empty": (weights_of(b""), "not a readable safetensors file"),
    "cut off": (sparse(WEIGHTS, 3000), "not a readable safetensors file"),
    "cut in its header": (sparse(WEIGHTS, 100), "not a readable safetensors file"),
    "bytes too many": (
        lambda directory: os.truncate(directory / WEIGHTS, (directory / WEIGHTS).stat().st_size + 8),
        "not a readable safetensors file",
    ),
    "a terabyte": (sparse(WEIGHTS, 1 << 40), "not a readable safetensors file"),
    "a header of 10**12 bytes": (header("{}", length=10**12), "not a readable safetensors file"),
    "a header of 2**64 - 1 bytes": (header("{}", length=2**64 - 1), "not a readable safetensors file"),
    "a header of no bytes": (header("", length=0), "not a readable safetensors file"),
    "a header that is no JSON": (header("not a header"), "not a readable safetensors file"),
    "a header that is not UTF-8": (header(b'{"\xff": 1}'), "not a readable safetensors file"),
    "a header nested deeply": (header('{"a":' * 100_000), "not a readable safetensors file"),
    "no tensors": (header("{}"), f"tensor {EMBEDDING} [40, 16] is missing"),
    "an unknown dtype": (header(entry(dtype="F33"), data=BYTES), "not a readable safetensors file"),
    "offsets outside": (header(entry(), data=16), "not a readable safetensors file"),
    "offsets backwards": (header(entry(start=BYTES, end=0), data=BYTES), "not a readable safetensors file"),
    "offsets of another shape": (header(entry(shape=[4, 4]), data=BYTES), "not a readable safetensors file"),
    "a shape that overflows": (header(entry(shape=[2**40, 2**40]), data=BYTES), "not a readable safetensors file"),
    "a negative shape": (header(entry(shape=[-40, -16]), data=BYTES), "not a readable safetensors file"),
    "a tensor twice in a header": (
        header(f"{entry()[:-1]}, {entry(start=BYTES, end=2 * BYTES)[1:]}", data=2 * BYTES),
        "not a readable safetensors file",
    ),
    "a folder": (instead(WEIGHTS, Path.mkdir), f"{WEIGHTS} is not a regular file"),
    "a FIFO": (endless(WEIGHTS), f"{WEIGHTS} is not a regular file"),
    "a device": (instead(WEIGHTS, lambda file: file.symlink_to("/dev/zero")), f"{WEIGHTS} is not a regular file"),
    "a link that leads nowhere": (instead(WEIGHTS, lambda file: file.symlink_to("nowhere")), "is not there"),
    "pickled": (pickled, "; pytorch_model.bin may run code when it is read, and kvlab reads safetensors alone"),
    "whole numbers": (
        stored(EMBEDDING, torch.ones(SHAPE, dtype=torch.int32)),
        f"tensor {EMBEDDING} is stored as I32; known: F64, F32, F16, BF16",
    ),
    "float8 without its scale": (
        stored(EMBEDDING, torch.ones(SHAPE).to(torch.float8_e4m3fn)),
        "is stored as F8_E4M3; known",
    ),
    "no dimensions": (stored(EMBEDDING, torch.tensor(1.0)), "has shape [], the model needs [40, 16]"),
    "another shape": (stored(EMBEDDING, torch.ones(16, 40)), "has shape [16, 40], the model needs [40, 16]"),
    "a thousand dimensions": (
        header(entry(shape=[1] * 1000, end=4), data=4),
        "(3,000 characters), the model needs [40, 16]",
    ),
    "an empty tensor": (stored(NORM, torch.ones(0)), f"tensor {NORM} has shape [0], the model needs [16]"),
    "a tensor missing": (stored(NORM, None), f"tensor {NORM} [16] is missing"),
    "a tensor too many": (stored("model.x", torch.ones(1)), "the model has no place for tensor(s) model.x"),
    "a tensor with an odd name": (stored("\x1b[2J", torch.ones(1)), r"no place for tensor(s) \x1b[2J"),
    "a tensor with a long name": (stored("x" * 10**6, torch.ones(1)), "... (1,000,000 characters)"),
    "NaN": (stored(NORM, torch.full([16], float("nan"))), f"tensor {NORM} holds numbers that are not finite"),
    "infinity": (
        stored(NORM, torch.full([16], float("-inf"))),
        "holds numbers that are not finite in torch.bfloat16",
    ),
    "an index that is null": (index_of("null"), "not an index of safetensors shards (it holds no JSON object)"),
    "an index that is empty": (index_of(""), "not an index of safetensors shards (it is no JSON"),
    "an index nested deeply": (index_of('{"a":' * 200_000), "(it is no JSON that can be read (nested too deeply))"),
    "an index of no shards": (in_shards({}), "(weight_map has to name a file by tensor)"),
    "an index as a list": (in_shards([]), "(weight_map has to name a file by tensor)"),
    "a number as a shard": (in_shards({"a": 3}), "(weight_map has to name a file by tensor)"),
    "a shard with two values": (
        index_of('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'),
        "the key a has two values",
    ),
    "a shard above": (in_shards({"a": "../x.safetensors"}), "weight_map names ../x.safetensors; a shard has to be"),
    "a shard below": (in_shards({"a": "b/x.safetensors"}), "weight_map names b/x.safetensors; a shard has to be"),
    "a shard from the root": (in_shards({"a": "/etc/passwd"}), "weight_map names /etc/passwd; a shard has to be"),
    "a shard of Windows": (in_shards({"a": "..\\x.safetensors"}), "a shard has to be a .safetensors file beside"),
    "the folder above as a shard": (in_shards({"a": ".."}), "weight_map names ..; a shard has to be"),
    "the index as a shard": (in_shards({"a": INDEX}), f"weight_map names {INDEX}; a shard has to be"),
    "a pickled shard": (in_shards({"a": "pytorch_model-00001.bin"}), "a shard has to be a .safetensors file"),
    "a shard without a name": (in_shards({"a": ""}), "weight_map names ; a shard has to be"),
    "a shard with a null character": (
        in_shards({"a": "\0.safetensors"}),
        r"names \x00.safetensors, which cannot",
    ),
    "half a character as a shard": (in_shards({"a": "\ud800.safetensors"}), r"names \ud800.safetensors, which"),
    "a shard with a long name": (in_shards({"a": "x" * 5000 + ".safetensors"}), "which cannot be read"),
    "a shard that is not there": (in_shards({"a": "b.safetensors"}), "names b.safetensors, which is not there"),
    "a FIFO as a shard": (
        both(in_shards({"a": "b.safetensors"}), endless("b.safetensors")),
        "names b.safetensors, which is not a regular file",
    ),
    "a tensor in two shards": (
        twice_in_shards,
        f"00002.safetensors: tensor {NORM} is in model-00001.safetensors too",
    ),
}


HOSTILE = [pytest.param(*row, id=f"config: {what}") for what, row in CONFIGS.items()] + [
    pytest.param(*row, id=f"weights: {what}") for what, row in FILES.items()
]


def cached_by_a_hub(directory: Path) -> None:
    """The files of a snapshot are links to blobs elsewhere, named by their content."""
    blobs = directory.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(directory.iterdir())):
        file.rename(blobs / f"{number:064}")
        file.symlink_to(Path("..", "blobs", f"{number:064}"))


def cached_in_shards(directory: Path) -> None:
    indexed(directory, {"any": "model-00001.safetensors"})
    cached_by_a_hub(directory)


def with_files_nobody_reads(directory: Path) -> None:
    """What kvlab never opens cannot harm it: a FIFO would keep it waiting for ever."""
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "pytorch_model.bin", "model.py")
    for name in (*names, "adapter_model.bin", "special_tokens_map.json", INDEX):
        os.mkfifo(directory / name)


#: Odd, and served: the tokens are those of the sound checkpoint.
SOUND: dict[str, Mutation] = {
    "nothing": lambda _: None,
    "a byte order mark": described(b"\xef\xbb\xbf" + json.dumps(CONFIG).encode()),
    "a key twice with one value": described(json.dumps(CONFIG)[:-1] + ', "vocab_size": 40}'),
    "values of keys that mean nothing": described_as(nonsense=[float("nan"), {"a": None}], rope_scaling=None),
    "code for a family that kvlab knows": described_as(auto_map={"AutoConfig": "configuration_x.Config"}),
    "a hub's cache": cached_by_a_hub,
    "a hub's cache of shards": cached_in_shards,
    "files that nobody reads": with_files_nobody_reads,
}
