"""The shape of one token's K and V, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a model stores per token: K and V of `[num_kv_heads, head_dim]` in each layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # "float32", "bfloat16" or "float16"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers: 2 x layers x kv_heads x head_dim x element size."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
