"""The shape of one token's K and V, and what it costs."""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from kvlab.kv.groups import LayerGroup, layers_per_block

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
SCALE_BYTES = 4  # of the float32 that each head of a token has beside it in int8 and fp8
INT4_GROUP, INT4_GROUP_BYTES = 32, 18  # numbers that share a scale; their bytes with it: 2 + 32 / 2


class PageLayout(StrEnum):
    """The order of a block's axes in memory: N tokens, H heads, D numbers of a head (the names of FlashInfer and
    vLLM).
    """

    HND = "HND"
    NHD = "NHD"


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a model stores per token: K and V of `[num_kv_heads, head_dim]` in each layer, or one latent of both."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # of K, and of V unless it has one of its own: a key of DTYPE_BYTES, or "int4"
    value_dtype: str | None = None
    tensor_scales: bool = False  # fp8 as serving frameworks store it: one scale for a whole tensor, not counted
    groups: tuple[LayerGroup, ...] = ()  # of layers, by what they need of a sequence; (): all layers need all of it
    value_dim: int | None = None  # numbers of a head's V; None: `head_dim`; 0: none, K is a latent of both
    copies: int = 1  # simulated devices that each have the same K and V

    @property
    def dtypes(self) -> tuple[str, str]:
        """The formats of K and V."""
        return self.dtype, self.value_dtype or self.dtype

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of the numbers of a head of a token, of K and of V; scales that are stored apart not counted."""
        key, value = self.dtypes
        numbers = self.head_dim if self.value_dim is None else self.value_dim
        return _row_bytes(self.head_dim, key), _row_bytes(numbers, value)

    @property
    def is_scaled(self) -> tuple[bool, bool]:
        """Whether each head of a token has a scale of its own in a tensor beside the numbers, of K and of V."""
        scaled = {"int8"} if self.tensor_scales else {"int8", "fp8_e4m3", "fp8_e5m2"}
        key, value = self.dtypes
        return key in scaled, value in scaled and self.value_dim != 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers: layers x kv_heads x (head_dim x element size + scale), of K and V, as
        often as there are copies.
        """
        heads = self.copies * self.num_layers * self.num_kv_heads
        return heads * (sum(self.row_bytes) + SCALE_BYTES * sum(self.is_scaled))

    @property
    def layers_per_block(self) -> int:
        """Layers whose K and V a block holds."""
        return layers_per_block(self.groups) if self.groups else self.num_layers

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a block's slot for a token, which has K and V of `layers_per_block` layers."""
        return self.bytes_per_token // self.num_layers * self.layers_per_block

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Where each layer's K and V are: its group, and which of a block's layers it is there. (): all layers are
        in one group, in order.
        """
        return _places(self.groups)


def _row_bytes(numbers: int, dtype: str) -> int:
    if dtype == "int4":
        return -(-numbers // INT4_GROUP) * INT4_GROUP_BYTES
    return numbers * DTYPE_BYTES[dtype]


@lru_cache
def _places(groups: tuple[LayerGroup, ...]) -> tuple[tuple[int, int], ...]:
    by_layer = {
        layer: (number, place) for number, group in enumerate(groups) for place, layer in enumerate(group.layers)
    }
    return tuple(by_layer[layer] for layer in sorted(by_layer))
