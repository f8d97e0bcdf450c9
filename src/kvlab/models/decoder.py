"""The decoder: one ragged forward pass over a flat batch, K and V in the cache."""

from __future__ import annotations

import torch
from torch.nn import functional

from kvlab.attention.base import AttentionBackend, AttentionSpec
from kvlab.kv.view import CacheView
from kvlab.models.config import DecoderConfig
from kvlab.models.layers import Linear, RMSNorm
from kvlab.models.rope import RotaryEmbedding, rotate
from kvlab.models.weights import WeightSource


class Attention:
    """Projections, per-head norms, rotary angles, cache update, attention."""

    def __init__(self, config: DecoderConfig, layer: int, weights: WeightSource) -> None:
        name = f"model.layers.{layer}.self_attn"
        hidden, dim = config.hidden_size, config.head_dim
        self._layer = layer
        self._heads, self._kv_heads, self._dim = config.num_heads, config.num_kv_heads, dim
        shapes = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
        parts = [weights.take(f"{name}.{x}_proj.weight", (size, hidden)) for x, size in shapes.items()]
        self._qkv = Linear(torch.cat(parts))
        self._out = Linear(weights.take(f"{name}.o_proj.weight", (hidden, config.num_heads * dim)))
        self._q_norm = self._k_norm = None
        if config.qk_norm:
            self._q_norm = RMSNorm(weights.take(f"{name}.q_norm.weight", (dim,)), config.rms_norm_eps)
            self._k_norm = RMSNorm(weights.take(f"{name}.k_norm.weight", (dim,)), config.rms_norm_eps)

    def __call__(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        view: CacheView,
        backend: AttentionBackend,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """`[T, hidden]` to `[T, hidden]`."""
        heads = self._qkv(x).view(len(x), -1, self._dim)
        q, k, v = torch.split(heads, [self._heads, self._kv_heads, self._kv_heads], dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        view.update(self._layer, rotate(k, *angles), v)
        out = backend.forward(rotate(q, *angles), view, self._layer, spec)
        return self._out(out.view(len(x), -1))


class MLP:
    """Gated feed-forward: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: DecoderConfig, layer: int, weights: WeightSource) -> None:
        name, wide = f"model.layers.{layer}.mlp", (config.intermediate_size, config.hidden_size)
        self._gate_up = Linear(
            torch.cat([weights.take(f"{name}.{part}_proj.weight", wide) for part in ("gate", "up")])
        )
        self._down = Linear(weights.take(f"{name}.down_proj.weight", wide[::-1]))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]` to `[T, hidden]`."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(functional.silu(gate) * up)


class DecoderLayer:
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int, weights: WeightSource) -> None:
        name, shape, eps = f"model.layers.{layer}", (config.hidden_size,), config.rms_norm_eps
        self._attention_norm = RMSNorm(weights.take(f"{name}.input_layernorm.weight", shape), eps)
        self._attention = Attention(config, layer, weights)
        self._mlp_norm = RMSNorm(weights.take(f"{name}.post_attention_layernorm.weight", shape), eps)
        self._mlp = MLP(config, layer, weights)

    def __call__(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        view: CacheView,
        backend: AttentionBackend,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """`[T, hidden]` to `[T, hidden]`."""
        x = x + self._attention(self._attention_norm(x), angles, view, backend, spec)
        return x + self._mlp(self._mlp_norm(x))


class Decoder:
    """A decoder-only transformer over a paged cache.

    `max_positions` bounds the positions it computes rotary angles for. Weights are taken from `weights` one by
    one and packed at once, so that building needs little more memory than the model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        attention: AttentionBackend,
        spec: AttentionSpec,
        max_positions: int,
    ) -> None:
        self.config = config
        self.attention = attention
        self._spec = spec
        vocabulary = (config.vocab_size, config.hidden_size)
        self._embedding = weights.take("model.embed_tokens.weight", vocabulary)
        self._layers = [DecoderLayer(config, layer, weights) for layer in range(config.num_layers)]
        self._norm = RMSNorm(weights.take("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self._lm_head = Linear(self._embedding if tied else weights.take("lm_head.weight", vocabulary))
        weights.finish()
        self._rotary = RotaryEmbedding(
            config.rope, config.head_dim, max_positions, self._embedding.dtype, self._embedding.device
        )

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> torch.Tensor:
        """Run the flat batch `token_ids` `[T]` and store its K and V.

        Returns logits `[len(rows), vocab]` for the positions of the batch that `rows` names; none for the
        others.
        """
        x = functional.embedding(token_ids, self._embedding)
        angles = self._rotary.angles(view.positions)
        for layer in self._layers:
            x = layer(x, angles, view, self.attention, self._spec)
        return self._lm_head(self._norm(x[rows]))


def attention_spec(config: DecoderConfig, dtype: str, device: str) -> AttentionSpec:
    """What the decoder's layers ask of an attention backend."""
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        dtype=dtype,
        device=device,
    )
