"""A sound checkpoint of a few numbers, and ways to make a hostile one of it."""

from __future__ import annotations

import json
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvlab.config import EngineConfig, ExecutorConfig, KVConfig, ModelConfig
from kvlab.core import Request, SamplingParams
from kvlab.engine.service import Engine
from kvlab.errors import KvlabError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "eos_token_id": None,
}
#: A tensor of every checkpoint, `[vocab, hidden]` in float32.
EMBEDDING = "model.embed_tokens.weight"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: One way to damage the checkpoint in a directory.
Mutation = Callable[[Path], object]


def write_checkpoint(directory: Path) -> None:
    """config.json and model.safetensors, sound."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    layer, hidden, wide = "model.layers.0.", CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {
        EMBEDDING: (CONFIG["vocab_size"], hidden),
        "lm_head.weight": (CONFIG["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        f"{layer}self_attn.q_proj.weight": (hidden, hidden),
        f"{layer}self_attn.k_proj.weight": (hidden // 2, hidden),
        f"{layer}self_attn.v_proj.weight": (hidden // 2, hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, hidden),
        f"{layer}mlp.gate_proj.weight": (wide, hidden),
        f"{layer}mlp.up_proj.weight": (wide, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, wide),
    }
    source = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(shape, generator=source) for name, shape in shapes.items()}, directory / WEIGHTS)


def serve(directory: Path) -> list[int]:
    """The tokens that an engine with this checkpoint gives to a prompt."""
    model = ModelConfig("hostile", family=None, path=str(directory), weights=None, max_seq_len=32)
    executor = ExecutorConfig(device="cpu", kernels=False, threads=1)
    engine = Engine.from_config(EngineConfig(model, kv=KVConfig(num_blocks=4), executor=executor))
    request = Request("a", (1, 2, 3), SamplingParams(max_tokens=4))
    return [output.token_id for output in engine.generate(request) if output.token_id is not None]


def described(text: str | bytes) -> Mutation:
    """config.json is this text."""
    content = text if isinstance(text, bytes) else text.encode()
    return lambda directory: (directory / "config.json").write_bytes(content)


def described_as(**changes: Any) -> Mutation:
    """config.json has these values instead of sound ones."""
    return described(json.dumps(CONFIG | changes))


def instead(name: str, make: Callable[[Path], object]) -> Mutation:
    """What `make` makes has this file's name and place."""

    def mutate(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return mutate


def stored(name: str, tensor: torch.Tensor | None) -> Mutation:
    """model.safetensors holds this tensor, or with None does not hold it."""

    def mutate(directory: Path) -> None:
        tensors = {**load_file(directory / WEIGHTS), name: tensor}
        save_file({key: value for key, value in tensors.items() if value is not None}, directory / WEIGHTS)

    return mutate


def weights_of(content: bytes) -> Mutation:
    """model.safetensors has these bytes."""
    return lambda directory: (directory / WEIGHTS).write_bytes(content)


def header(text: str | bytes, *, length: int | None = None, data: int = 0) -> Mutation:
    """model.safetensors has this header, says that it is `length` bytes long, and goes on with `data` zeros."""
    content = text if isinstance(text, bytes) else text.encode()
    return weights_of(struct.pack("<Q", len(content) if length is None else length) + content + bytes(data))


def indexed(directory: Path, weight_map: object, *, shard: str = "model-00001.safetensors") -> None:
    """The weights become a shard, with an index that has this `weight_map`."""
    (directory / WEIGHTS).rename(directory / shard)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def in_shards(weight_map: object) -> Mutation:
    """The same as a mutation."""
    return lambda directory: indexed(directory, weight_map)


def index_of(text: str) -> Mutation:
    """The weights become a shard, with an index of this text."""

    def mutate(directory: Path) -> None:
        indexed(directory, {})
        (directory / INDEX).write_text(text)

    return mutate


def damage(directory: Path, seed: int) -> str | None:
    """Write a sound checkpoint into a directory, damage it at random and serve it: bits flipped, characters put in,
    out and in another's place, in config.json or in front of the weights. Returns the sentence if it is refused;
    raises what is no KvlabError.
    """
    write_checkpoint(directory)
    choose = random.Random(seed)
    name = choose.choice(["config.json", WEIGHTS, WEIGHTS])
    content = bytearray((directory / name).read_bytes())
    end = 8 + int.from_bytes(content[:8], "little") if name == WEIGHTS else len(content)
    for _ in range(choose.randint(1, 4)):
        at = choose.randrange(min(end, len(content)))
        until = at + choose.randint(0, 1)
        flipped = content[at] ^ 1 << choose.randrange(8)
        new = flipped if choose.random() < 0.25 else choose.choice(b'0123456789"{}[],:-e.tn\\\x00\xff')
        content[at:until] = bytes([new]) if choose.random() < 0.75 else b""
    (directory / name).write_bytes(content)
    try:
        serve(directory)
    except KvlabError as error:
        return str(error)
    return None


def plant_code(directory: Path, model_type: str) -> Path:
    """Put code of its own into a checkpoint in each way that one can name it: classes, and a pickle. Returns the
    file that running any of it would write.
    """
    marker = directory / "it-ran"
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Config: pass\nModel = Config\n"
    for name in ("configuration_x.py", "modeling_x.py", "tokenization_x.py", "__init__.py", "torch.py"):
        (directory / name).write_text(code)
    classes = {
        "AutoConfig": "configuration_x.Config",
        "AutoModelForCausalLM": "modeling_x.Model",
        "AutoTokenizer": ["tokenization_x.Model", None],
    }
    described_as(model_type=model_type, auto_map=classes)(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"auto_map": classes}))
    (directory / "generation_config.json").write_text(json.dumps({"custom_generate": "generate.py"}))
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(_Writing(str(marker))))
    return marker


class _Writing:
    """What unpickles into a file."""

    def __init__(self, file: str) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._file, "w")
