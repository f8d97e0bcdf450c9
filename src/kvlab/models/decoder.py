"""The decoder: one ragged forward pass over a flat batch, K and V in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from kvlab.attention.base import AttentionBackend, AttentionSpec
from kvlab.kv.view import CacheView
from kvlab.models.config import DecoderConfig
from kvlab.models.layers import ACTIVATIONS, Linear, RMSNorm
from kvlab.models.rope import RotaryEmbedding, rotate_both
from kvlab.models.weights import WeightSource


def _norm(weights: WeightSource, name: str, size: int, config: DecoderConfig) -> RMSNorm:
    return RMSNorm(weights.take(f"{name}.weight", (size,)), config.rms_norm_eps, offset=config.norm_offset)


class Attention:
    """Projections, per-head norms, rotary angles, cache update, attention."""

    def __init__(self, config: DecoderConfig, layer: int, weights: WeightSource) -> None:
        name = f"model.layers.{layer}.self_attn"
        hidden, dim = config.hidden_size, config.head_dim
        self._layer = layer
        self._heads, self._kv_heads, self._dim = config.num_heads, config.num_kv_heads, dim
        shapes = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
        parts = [weights.take(f"{name}.{x}_proj.weight", (size, hidden)) for x, size in shapes.items()]
        bias = out_bias = None
        if config.qkv_bias:
            bias = torch.cat([weights.take(f"{name}.{x}_proj.bias", (size,)) for x, size in shapes.items()])
        self._qkv = Linear(torch.cat(parts), bias)
        out = weights.take(f"{name}.o_proj.weight", (hidden, config.num_heads * dim))
        if config.output_bias:
            out_bias = weights.take(f"{name}.o_proj.bias", (hidden,))
        self._out = Linear(out, out_bias)
        self._q_norm = self._k_norm = None
        if config.qk_norm:
            self._q_norm = _norm(weights, f"{name}.q_norm", dim, config)
            self._k_norm = _norm(weights, f"{name}.k_norm", dim, config)

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
        q, k = rotate_both(q, k, *angles)
        view.update(self._layer, k, v)
        out = backend.forward(q, view, self._layer, spec)
        return self._out(out.view(len(x), -1))


class MLP:
    """Gated feed-forward: down(activation(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: DecoderConfig, layer: int, weights: WeightSource) -> None:
        name, wide = f"model.layers.{layer}.mlp", (config.intermediate_size, config.hidden_size)
        self._gate_up = Linear(
            torch.cat([weights.take(f"{name}.{part}_proj.weight", wide) for part in ("gate", "up")])
        )
        self._down = Linear(weights.take(f"{name}.down_proj.weight", wide[::-1]))
        self._activation = ACTIVATIONS[config.activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]` to `[T, hidden]`."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._activation(gate) * up)


class DecoderLayer:
    """Attention and feed-forward, each behind a norm (between two: sandwich) and added to the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int, weights: WeightSource) -> None:
        name, hidden = f"model.layers.{layer}", config.hidden_size
        # What stands ahead of the feed-forward has the name that a sandwich gives to what stands behind attention.
        ahead = "pre_feedforward_layernorm" if config.sandwich_norms else "post_attention_layernorm"
        self._attention_norm = _norm(weights, f"{name}.input_layernorm", hidden, config)
        self._attention = Attention(config, layer, weights)
        self._mlp_norm = _norm(weights, f"{name}.{ahead}", hidden, config)
        self._mlp = MLP(config, layer, weights)
        self._post_attention_norm = self._post_mlp_norm = None
        if config.sandwich_norms:
            self._post_attention_norm = _norm(weights, f"{name}.post_attention_layernorm", hidden, config)
            self._post_mlp_norm = _norm(weights, f"{name}.post_feedforward_layernorm", hidden, config)

    def __call__(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        view: CacheView,
        backend: AttentionBackend,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """`[T, hidden]` to `[T, hidden]`."""
        y = self._attention(self._attention_norm(x), angles, view, backend, spec)
        x = x + (y if self._post_attention_norm is None else self._post_attention_norm(y))
        y = self._mlp(self._mlp_norm(x))
        return x + (y if self._post_mlp_norm is None else self._post_mlp_norm(y))


class Decoder:
    """A decoder-only transformer over a paged cache.

    `attention` computes what `specs` ask, one for each layer (see `attention_specs`). `max_positions` bounds the
    positions it computes rotary angles for. Weights are taken from `weights` one by one and packed at once, so
    that building needs little more memory than the model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        attention: AttentionBackend,
        specs: Sequence[AttentionSpec],
        max_positions: int,
    ) -> None:
        self.config = config
        self.attention = attention
        vocabulary = (config.vocab_size, config.hidden_size)
        self._embedding = weights.take("model.embed_tokens.weight", vocabulary)
        dtype, device = self._embedding.dtype, self._embedding.device
        # Rounded to the model's dtype, as the model was trained with.
        scale = config.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()
        layers = [DecoderLayer(config, layer, weights) for layer in range(config.num_layers)]
        self._norm = _norm(weights, "model.norm", config.hidden_size, config)
        tied = config.tie_word_embeddings
        self._lm_head = Linear(self._embedding if tied else weights.take("lm_head.weight", vocabulary))
        weights.finish()
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
        self._rotary = [RotaryEmbedding(rope, config.head_dim, max_positions, dtype, device) for rope in ropes]
        # Each layer with its attention, and the one of the rotary tables that it uses.
        tables = [ropes.index(layer.rope) for layer in config.layers]
        self._layers = list(zip(layers, specs, tables, strict=True))

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> torch.Tensor:
        """Run the flat batch `token_ids` `[T]` and store its K and V.

        Returns logits `[len(rows), vocab]` for the positions of the batch that `rows` names; none for the
        others.
        """
        x = functional.embedding(token_ids, self._embedding)
        if self._embedding_scale is not None:
            x = x * self._embedding_scale
        angles = [rotary.angles(view.positions) for rotary in self._rotary]
        for layer, spec, table in self._layers:
            x = layer(x, angles[table], view, self.attention, spec)
        logits = self._lm_head(self._norm(x[rows]))
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def attention_specs(config: DecoderConfig, dtype: str, device: str) -> tuple[AttentionSpec, ...]:
    """What each of the decoder's layers asks of an attention backend."""
    return tuple(
        AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            dtype=dtype,
            device=device,
            sliding_window=layer.sliding_window,
            soft_cap=config.attention_soft_cap,
        )
        for layer in config.layers
    )
