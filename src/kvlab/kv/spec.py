"""The shape of one token's K and V, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
SCALE_BYTES = 4  # of the float32 that each head of a token has beside it in int8


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a model stores per token: K and V of `[num_kv_heads, head_dim]` in each layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES

    @property
    def is_scaled(self) -> bool:
        """Whether each token's K and V have a scale per head beside them. fp8 has one for a whole tensor."""
        return self.dtype == "int8"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers: 2 x layers x kv_heads x (head_dim x element size + scale)."""
        head = self.head_dim * DTYPE_BYTES[self.dtype] + (SCALE_BYTES if self.is_scaled else 0)
        return 2 * self.num_layers * self.num_kv_heads * head
