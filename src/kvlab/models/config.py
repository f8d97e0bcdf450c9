"""The options that make one decoder many models."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.kv.spec import DTYPE_BYTES, KVSpec


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, 2021), with the frequency scaling of Llama 3.1 where `factor` is
    not 1: wavelengths longer than `original_max_position / low_freq_factor` are stretched by `factor`, those
    shorter than `original_max_position / high_freq_factor` kept, and blended in between.
    """

    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shapes and options of a decoder-only transformer."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool  # RMSNorm over each head of q and k (Qwen3)
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        """Weights of the model; tied embeddings count once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + norms
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the weights in memory: a tied embedding is held twice, once to look tokens up and once as
        the packed output layer.
        """
        second = self.vocab_size * self.hidden_size if self.tie_word_embeddings else 0
        return (self.num_parameters + second) * DTYPE_BYTES[dtype]

    def kv_spec(self, dtype: str) -> KVSpec:
        """What the model stores in the cache per token."""
        return KVSpec(self.num_layers, self.num_kv_heads, self.head_dim, dtype)
