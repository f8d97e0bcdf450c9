"""The parts of a decoder layer. Each computes itself; a Stack may compute many of them at once."""

from dataclasses import dataclass

import torch

from kvlab.attention.base import AttentionSpec, check_attended
from kvlab.models.config import DecoderConfig
from kvlab.models.ops.base import LayerPart, Linear, Norm, Ops, ResidualAndX, StepContext
from kvlab.models.rope import RotaryEmbedding
from kvlab.models.weights import WeightSource


@dataclass(frozen=True, slots=True)
class NormPart(LayerPart):
    """x = norm(x), of whole rows `[T, hidden]`."""

    ops: Ops
    norm: Norm

    def __call__(self, residual: torch.Tensor, x: torch.Tensor, step: StepContext) -> ResidualAndX:
        return residual, self.ops.norm(x, self.norm)


class InputNorm(NormPart):
    """The first norm of a decoder, of the embeddings, which the residual stream has already."""


class ResidualNorm(NormPart):
    """residual += x, x = norm(residual), in one pass."""

    def __call__(self, residual: torch.Tensor, x: torch.Tensor, step: StepContext) -> ResidualAndX:
        return self.ops.add_norm(x, residual, self.norm)


class OutputNorm(NormPart):
    """The norm behind attention or MLP, before their output is added to the residual stream."""


@dataclass(frozen=True, slots=True)
class AttentionPart(LayerPart):
    """Projections, norms of each head (None: the model has none), rotary angles, cache update, attention."""

    ops: Ops
    layer: int  # of the cache
    qkv: Linear
    norms: tuple[Norm, Norm] | None  # of queries and of keys
    rotary: RotaryEmbedding
    spec: AttentionSpec
    out: Linear

    def __call__(self, residual: torch.Tensor, x: torch.Tensor, step: StepContext) -> ResidualAndX:
        heads, view = self.qkv(x).view(len(x), -1, self.spec.head_dim), step.view.of_layer(self.layer)
        q = self.ops.rotate_and_store(heads, self.norms, step.angles[self.rotary], view, self.layer)
        attended = step.attention.forward(q, view, self.layer, self.spec)
        check_attended(step.attention, attended, q)
        return residual, self.out(attended.view(len(x), -1))


@dataclass(frozen=True, slots=True)
class MlpPart(LayerPart):
    """Gated feed-forward: down(activation(gate(x)) * up(x)) (Shazeer, 2020)."""

    ops: Ops
    gate_up: Linear
    activation: str
    down: Linear

    def __call__(self, residual: torch.Tensor, x: torch.Tensor, step: StepContext) -> ResidualAndX:
        return residual, self.down(self.ops.gated(self.gate_up(x), self.activation))


def read_norm(weights: WeightSource, name: str, size: int, config: DecoderConfig) -> Norm:
    """The norm whose weight is called `name`."""
    weight = weights.take(f"{name}.weight", (size,))
    return Norm(1.0 + weight.float() if config.norm_offset else weight, config.rms_norm_eps)


def read_layer(
    config: DecoderConfig, layer: int, weights: WeightSource, ops: Ops, rotary: RotaryEmbedding, spec: AttentionSpec
) -> tuple[LayerPart, ...]:
    """A layer's parts: attention and feed-forward, each behind a norm or, in a sandwich, between two."""

    def norm(name: str) -> Norm:
        return read_norm(weights, f"model.layers.{layer}.{name}_layernorm", config.hidden_size, config)

    first, sandwich = norm("input"), config.sandwich_norms
    parts: list[LayerPart] = [ResidualNorm(ops, first) if layer else InputNorm(ops, first)]
    parts.append(_read_attention(config, layer, weights, ops, rotary, spec))
    if sandwich:
        parts.append(OutputNorm(ops, norm("post_attention")))
    # Without a sandwich, checkpoints call the norm ahead of the MLP as a sandwich calls the one behind attention.
    parts.append(ResidualNorm(ops, norm("pre_feedforward" if sandwich else "post_attention")))
    parts.append(_read_mlp(config, layer, weights, ops))
    if sandwich:
        parts.append(OutputNorm(ops, norm("post_feedforward")))
    return tuple(parts)


def _read_attention(
    config: DecoderConfig, layer: int, weights: WeightSource, ops: Ops, rotary: RotaryEmbedding, spec: AttentionSpec
) -> AttentionPart:
    name, hidden, dim = f"model.layers.{layer}.self_attn", config.hidden_size, config.head_dim
    sizes = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}

    def merged(kind: str, *columns: int) -> torch.Tensor:
        return torch.cat([weights.take(f"{name}.{x}_proj.{kind}", (size, *columns)) for x, size in sizes.items()])

    qkv = ops.linear(merged("weight", hidden), merged("bias") if config.qkv_bias else None)
    out_weight = weights.take(f"{name}.o_proj.weight", (hidden, sizes["q"]))
    out_bias = weights.take(f"{name}.o_proj.bias", (hidden,)) if config.output_bias else None
    norms = None
    if config.qk_norm:
        query_norm, key_norm = (read_norm(weights, f"{name}.{x}_norm", dim, config) for x in ("q", "k"))
        norms = query_norm, key_norm
    return AttentionPart(ops, layer, qkv, norms, rotary, spec, ops.linear(out_weight, out_bias))


def _read_mlp(config: DecoderConfig, layer: int, weights: WeightSource, ops: Ops) -> MlpPart:
    name, wide = f"model.layers.{layer}.mlp", (config.intermediate_size, config.hidden_size)
    gate_up = ops.linear(torch.cat([weights.take(f"{name}.{x}_proj.weight", wide) for x in ("gate", "up")]))
    down = ops.linear(weights.take(f"{name}.down_proj.weight", wide[::-1]))
    return MlpPart(ops, gate_up, config.activation, down)
