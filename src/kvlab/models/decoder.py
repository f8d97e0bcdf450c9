"""The decoder: one ragged forward pass over a flat batch, K and V in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional

from kvlab.attention.base import AttentionBackend, AttentionSpec
from kvlab.kv.view import CacheView
from kvlab.models.config import DecoderConfig
from kvlab.models.ops.base import Angles, LayerParts, Norm, Ops, TopK
from kvlab.models.ops.torch_ops import TorchOps
from kvlab.models.rope import RotaryEmbedding
from kvlab.models.weights import WeightSource


def _norm(weights: WeightSource, name: str, size: int, config: DecoderConfig) -> Norm:
    weight = weights.take(f"{name}.weight", (size,))
    return Norm(1.0 + weight.float() if config.norm_offset else weight, config.rms_norm_eps)


def _add_norm(
    ops: Ops, delta: torch.Tensor | None, residual: torch.Tensor, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """`residual` + `delta`, and that normed. No delta: nothing is left to add."""
    return (residual, ops.norm(residual, norm)) if delta is None else ops.add_norm(delta, residual, norm)


class Attention:
    """Projections, per-head norms, rotary angles, cache update, attention."""

    def __init__(self, config: DecoderConfig, layer: int, weights: WeightSource, ops: Ops) -> None:
        name = f"model.layers.{layer}.self_attn"
        hidden, dim = config.hidden_size, config.head_dim
        self._ops = ops
        self._layer = layer
        self._dim = dim
        shapes = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
        parts = [weights.take(f"{name}.{x}_proj.weight", (size, hidden)) for x, size in shapes.items()]
        bias = out_bias = None
        if config.qkv_bias:
            bias = torch.cat([weights.take(f"{name}.{x}_proj.bias", (size,)) for x, size in shapes.items()])
        self.qkv = ops.linear(torch.cat(parts), bias)
        out = weights.take(f"{name}.o_proj.weight", (hidden, config.num_heads * dim))
        if config.output_bias:
            out_bias = weights.take(f"{name}.o_proj.bias", (hidden,))
        self.out = ops.linear(out, out_bias)
        self.norms = None
        if config.qk_norm:
            self.norms = (
                _norm(weights, f"{name}.q_norm", dim, config),
                _norm(weights, f"{name}.k_norm", dim, config),
            )

    def __call__(
        self,
        x: torch.Tensor,
        angles: Angles,
        view: CacheView,
        backend: AttentionBackend,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """`[T, hidden]` to `[T, hidden]`."""
        heads = self.qkv(x).view(len(x), -1, self._dim)
        q = self._ops.rotate_and_store(heads, self.norms, angles, view, self._layer)
        out = backend.forward(q, view, self._layer, spec)
        return self.out(out.view(len(x), -1))


class MLP:
    """Gated feed-forward: down(activation(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: DecoderConfig, layer: int, weights: WeightSource, ops: Ops) -> None:
        name, wide = f"model.layers.{layer}.mlp", (config.intermediate_size, config.hidden_size)
        self._ops = ops
        self.gate_up = ops.linear(
            torch.cat([weights.take(f"{name}.{part}_proj.weight", wide) for part in ("gate", "up")])
        )
        self.down = ops.linear(weights.take(f"{name}.down_proj.weight", wide[::-1]))
        self.activation = config.activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]` to `[T, hidden]`."""
        return self.down(self._ops.gated(self.gate_up(x), self.activation))


class DecoderLayer:
    """Attention and feed-forward, each behind a norm (between two: sandwich) and added to the residual stream.

    Takes the stream and what the layer before has yet to add to it, and returns both, so that an addition and the
    norm behind it are one pass.
    """

    def __init__(self, config: DecoderConfig, layer: int, weights: WeightSource, ops: Ops) -> None:
        name, hidden = f"model.layers.{layer}", config.hidden_size
        self._ops = ops
        # What stands ahead of the feed-forward has the name that a sandwich gives to what stands behind attention.
        ahead = "pre_feedforward_layernorm" if config.sandwich_norms else "post_attention_layernorm"
        self._attention_norm = _norm(weights, f"{name}.input_layernorm", hidden, config)
        self._attention = Attention(config, layer, weights, ops)
        self._mlp_norm = _norm(weights, f"{name}.{ahead}", hidden, config)
        self._mlp = MLP(config, layer, weights, ops)
        self._post_attention_norm = self._post_mlp_norm = None
        if config.sandwich_norms:
            self._post_attention_norm = _norm(weights, f"{name}.post_attention_layernorm", hidden, config)
            self._post_mlp_norm = _norm(weights, f"{name}.post_feedforward_layernorm", hidden, config)

    def __call__(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        angles: Angles,
        view: CacheView,
        backend: AttentionBackend,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual` and `delta` `[T, hidden]`."""
        ops = self._ops
        residual, x = _add_norm(ops, delta, residual, self._attention_norm)
        delta = self._attention(x, angles, view, backend, spec)
        if self._post_attention_norm is not None:
            delta = ops.norm(delta, self._post_attention_norm)
        residual, x = ops.add_norm(delta, residual, self._mlp_norm)
        delta = self._mlp(x)
        if self._post_mlp_norm is not None:
            delta = ops.norm(delta, self._post_mlp_norm)
        return residual, delta

    def parts(self, rotary: RotaryEmbedding, spec: AttentionSpec) -> LayerParts:
        """What it computes with."""
        attention, mlp = self._attention, self._mlp
        return LayerParts(
            attention_norm=self._attention_norm,
            qkv=attention.qkv,
            qk_norms=attention.norms,
            angles=rotary,
            attention=spec,
            out=attention.out,
            post_attention_norm=self._post_attention_norm,
            mlp_norm=self._mlp_norm,
            gate_up=mlp.gate_up,
            activation=mlp.activation,
            down=mlp.down,
            post_mlp_norm=self._post_mlp_norm,
        )


class Decoder:
    """A decoder-only transformer over a paged cache.

    `attention` computes what `specs` ask, one for each layer (see `attention_specs`), `ops` everything else (None:
    PyTorch does). `max_positions` bounds the positions there are rotary angles for. Weights are taken from
    `weights` one by one and packed at once, so that building needs little more memory than the model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        attention: AttentionBackend,
        specs: Sequence[AttentionSpec],
        max_positions: int,
        ops: Ops | None = None,
    ) -> None:
        self.config = config
        self.attention = attention
        self.ops = ops = ops or TorchOps()
        vocabulary = (config.vocab_size, config.hidden_size)
        embedding = weights.take("model.embed_tokens.weight", vocabulary)
        dtype, device = embedding.dtype, embedding.device
        self._embed: Callable[[torch.Tensor], torch.Tensor]
        tied = config.tie_word_embeddings
        if tied:
            self._lm_head = ops.linear(embedding, lookup=True)
            self._embed = self._lm_head.rows
        else:
            self._embed = partial(functional.embedding, weight=embedding)
        del embedding  # a tied one is the output layer's now, which may keep it in another form
        # Rounded to the model's dtype, as the model was trained with.
        scale = config.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()
        layers = [DecoderLayer(config, layer, weights, ops) for layer in range(config.num_layers)]
        self._norm = _norm(weights, "model.norm", config.hidden_size, config)
        if not tied:
            self._lm_head = ops.linear(weights.take("lm_head.weight", vocabulary))
        weights.finish()
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
        self._rotary = [RotaryEmbedding(rope, config.head_dim, max_positions, dtype, device) for rope in ropes]
        # Each layer with its attention, and the one of the rotary tables that it uses.
        tables = [ropes.index(layer.rope) for layer in config.layers]
        self._layers = list(zip(layers, specs, tables, strict=True))
        parts = [layer.parts(self._rotary[table], spec) for layer, spec, table in self._layers]
        self._stack = ops.stack(parts, attention)

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> torch.Tensor:
        """Run the flat batch `token_ids` `[T]` and store its K and V.

        Returns logits `[len(rows), vocab]` for the positions of the batch that `rows` names; none for the
        others.
        """
        return self._capped(self._lm_head(self._last(token_ids, view, rows)))

    @torch.inference_mode()
    def forward_top1(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> TopK:
        """The same, but of each row's logits only the largest and its place: the others need not be kept."""
        x = self._last(token_ids, view, rows)
        if self.config.logit_soft_cap is None:
            return self.ops.linear_top1(self._lm_head, x)
        return self.ops.topk(self._capped(self._lm_head(x)))  # what differs may be equal once it is capped

    def _last(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> torch.Tensor:
        """What the output layer takes of `rows`, `[len(rows), hidden]`."""
        residual = self._embed(token_ids)
        if self._embedding_scale is not None:
            residual = residual * self._embedding_scale
        delta: torch.Tensor | None
        residual, delta = self._one_by_one(residual, view) if self._stack is None else self._stack(residual, view)
        if len(rows) < len(token_ids):
            delta, residual = None if delta is None else delta[rows], residual[rows]
        return _add_norm(self.ops, delta, residual, self._norm)[1]

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _one_by_one(self, residual: torch.Tensor, view: CacheView) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What a Stack does, and a model without layers."""
        angles = [self.ops.angles(rotary, view.positions) for rotary in self._rotary]
        delta: torch.Tensor | None = None
        for layer, spec, table in self._layers:
            residual, delta = layer(residual, delta, angles[table], view, self.attention, spec)
        return residual, delta


def attention_specs(
    config: DecoderConfig, dtype: str, device: str, kv_dtype: str | None = None
) -> tuple[AttentionSpec, ...]:
    """What each of the decoder's layers asks of an attention backend; `kv_dtype`: of the cache, None: `dtype`."""
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
            kv_dtype=kv_dtype or dtype,
        )
        for layer in config.layers
    )
