"""A decoder's layers in one call: what passes between its kernels does not pass through Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kvlab.kernels.cpu.native import load

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class Norm(ctypes.Structure):
    """A norm's weights; none: the null pointer. These structures are in layers.cpp, too, field by field."""

    _fields_ = (("weight", _pointer), ("eps", _float), ("weight_bytes", _int))


class Product(ctypes.Structure):
    """A packed weight."""

    _fields_ = (
        *((name, _pointer) for name in ("packed", "scales", "bias")),
        *((name, _int) for name in ("outputs", "inputs")),
    )


class Layer(ctypes.Structure):
    """What stays the same from step to step."""

    _fields_ = (
        *((f"{name}_norm", Norm) for name in ("attention", "query", "key", "post_attention", "mlp", "post_mlp")),
        *((name, Product) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _pointer) for name in ("cosine", "sine")),
        *((name, _int) for name in ("num_heads", "num_kv_heads", "head_dim", "window", "gelu")),
        *((name, _float) for name in ("scale", "soft_cap")),
    )


class Step(ctypes.Structure):
    """What a step works on."""

    _fields_ = (
        *((name, _pointer) for name in ("keys", "values", "key_scales", "value_scales")),
        ("rows", ctypes.c_int64),
        *((name, _pointer) for name in ("positions", "slot_mapping", "block_tables", "seq_lens", "query_start")),
        *((name, _pointer) for name in ("residual", "delta", "normed", "scratch", "times")),
        *((name, _int) for name in ("tokens", "hidden", "num_sequences", "table_width", "block_size", "threads")),
    )


#: Of a tile of rows, see rows.hpp. `Step.normed` and `Step.scratch` have room for whole ones.
TILE_ROWS = 16

#: What `Step.times` are of: for each layer when each of these began, and when the last one ended.
TIMED = (
    "attention_norm",
    "qkv",
    "rotate_and_store",
    "attention",
    "out",
    "mlp_norm",
    "gate_up",
    "down",
    "post_mlp_norm",
)


class Layers:
    """Layers that can be run. The tensors they point to have to outlive them."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = (Layer * len(layers))(*layers)
        self._run = load().kvlab_layers

    def run(self, step: Step) -> None:
        """Run a step through all layers, see layers.cpp."""
        self._run(self._layers, len(self._layers), ctypes.byref(step))
