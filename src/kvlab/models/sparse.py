"""Mixtures of experts and latent attention (MLA), as plans and simulated devices know them: shapes, no layers.

transformers computes these families where an engine runs; what a serving framework stores of them on devices of its
own is described here, from the same values of a config.json, and needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvlab.config.executor import ExecutorConfig
from kvlab.errors import ConfigError
from kvlab.kv.spec import KVSpec
from kvlab.models.checkpoint_format import FP8_BLOCK, checkpoint_format
from kvlab.models.config import DecoderConfig, LayerConfig, eos_token_ids
from kvlab.models.linear import Linear, language_model, layer_kinds, read_linear
from kvlab.models.values import Family, Values


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward of a layer that is a mixture."""

    count: int
    active: int  # that compute a token
    size: int  # intermediate numbers of each
    shared: int  # of those that compute every token, all together
    layers: int  # that are mixtures; the others, which may be all, have one feed-forward of `intermediate_size`
    has_biases: bool  # of the experts and of the router
    has_correction: bool  # a float32 for each expert beside the router

    def met(self, tokens: int) -> float:
        """Experts of a layer that `tokens` tokens meet, expected where each meets any as likely as any other."""
        missed: float = (1 - self.active / self.count) ** tokens
        return self.count * (1 - missed)


class Latent(NamedTuple):
    """Latent attention: the cache has `rank` + `rope` numbers for a token and layer, whatever the heads."""

    query_rank: int | None  # None: queries come from the hidden state at once
    rank: int
    nope: int  # numbers of a head without positions
    rope: int  # and with
    value: int


class Formats(NamedTuple):
    """What matrices are stored in: names of kvlab.planning.formats, or a dtype."""

    attention: str  # projections, but the output's
    output: str  # the projection of attention's output
    dense: str  # feed-forwards that every token meets
    experts: str


class Division(NamedTuple):
    """Devices among which a model is divided: `tensor` share a sequence's heads, and `data` such groups share the
    sequences; all of them share the experts, `experts` by number and the others by their matrices.
    """

    tensor: int = 1
    data: int = 1
    experts: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return self.tensor * self.data

    @property
    def expert_tensor(self) -> int:
        """Devices that share the matrices of an expert."""
        return self.devices // self.experts


_UNDIVIDED = Division()


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfig(DecoderConfig):
    """A decoder with experts, with latent attention or without, divided among simulated devices."""

    experts: Experts
    latent: Latent | None
    quantization: str | None  # of the checkpoint: all in "fp8_block", or what experts alone are in; None: none
    norm_numbers: int  # of all norms
    bias_numbers: int  # of attention, sinks included, of all layers
    rotary_dim: int  # numbers of a head that are turned
    division: Division = _UNDIVIDED
    linear: Linear | None = None  # of the layers that have a state; None: there are none
    has_gate: bool = False  # on attention's output, which the projection of the queries gives

    @property
    def num_parameters(self) -> int:
        return self._parameters(self.experts.count)

    @property
    def active_parameters(self) -> int:
        head = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self._parameters(self.experts.active) - head

    @property
    def chosen_parameters(self) -> int:
        """Of the matrices of the experts that compute a token."""
        mixture = self.experts
        return mixture.layers * mixture.active * 3 * self.hidden_size * mixture.size

    def _parameters(self, experts: int) -> int:
        """With so many experts in each mixture; router and biases of all."""
        hidden, mixture = self.hidden_size, self.experts
        dense = (self.num_layers - mixture.layers) * 3 * hidden * self.intermediate_size
        routers = mixture.layers * mixture.count * (hidden + mixture.has_correction + mixture.has_biases)
        each = 3 * hidden * mixture.size + (2 * mixture.size + hidden if mixture.has_biases else 0)
        mixed = mixture.layers * (experts * each + 3 * hidden * mixture.shared)
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        attention = self.attention_layers * sum(outputs * inputs for outputs, inputs, _ in self.attention_matrices)
        if self.linear is not None:
            matrices = sum(outputs * inputs for outputs, inputs in self.linear.matrices(hidden))
            attention += self.linear_layers * (matrices + self.linear.vectors)
        return attention + dense + routers + mixed + embeddings + self.norm_numbers + self.bias_numbers

    def layer_numbers(self, queries: int, keys: int) -> int:
        """Numbers that a layer holds for a token of its group on each device beside the residual stream: so many
        of all query and KV heads, or those of the experts' kernels, whichever is more. These hold, for each expert
        that computes the token, the products of gate and up, or, in their place, of down; and what gate and up make
        together. They have room for the tokens of all groups.
        """
        mixture, parts = self.experts, self.division.expert_tensor
        experts = mixture.active * (max(2 * mixture.size // parts, self.hidden_size) + mixture.size // parts)
        heads = (queries * self.num_heads + keys * self.num_kv_heads) * self.head_dim
        if self.linear is not None:  # queries, keys, values and their gate
            heads = max(heads, 2 * (self.linear.keys + self.linear.values))
        return max(heads // self.division.tensor, experts * self.division.data)

    @property
    def linear_layers(self) -> int:
        """Layers that have a state in place of K and V."""
        return sum(layer.has_state for layer in self.layers)

    @property
    def attention_layers(self) -> int:
        """Layers that have K and V, or a latent of both."""
        return self.num_layers - self.linear_layers

    @property
    def attention_matrices(self) -> tuple[tuple[int, int, bool], ...]:
        """Outputs and inputs of each in a layer with attention, and whether every device has the whole of it."""
        hidden, heads = self.hidden_size, self.num_heads
        if (latent := self.latent) is None:
            q, kv = heads * self.head_dim, self.num_kv_heads * self.head_dim
            return ((1 + self.has_gate) * q, hidden, False), (2 * kv, hidden, False), (hidden, q, False)
        up, rank = heads * (latent.nope + latent.rope), latent.query_rank
        queries = ((up, hidden, False),) if rank is None else ((rank, hidden, True), (up, rank, False))
        down = (latent.rank + latent.rope, hidden, True)
        spread = (heads * (latent.nope + latent.value), latent.rank, False)
        return (*queries, down, spread, (hidden, heads * latent.value, False))

    def formats(self, weights: str, dtype: str) -> Formats:
        """What matrices are stored in under `executor.weights`, routers and output layer apart: `auto` is as the
        checkpoint has them, `nvfp4` as NVIDIA's checkpoints do: attention stays in 16 bits where experts alone were
        quantised before and in MiniMax's, and all of it but the output's projection in DeepSeek's.
        """
        if weights == "nvfp4":
            experts_alone = self.quantization not in (None, "fp8_block")
            kept = _ATTENTION if experts_alone else _NOT_NVFP4.get(self.family, ())
            attention, output = (dtype if part in kept else weights for part in _ATTENTION)
            return Formats(attention, output, weights, weights)
        if weights != "auto":
            stored = dtype if weights in ("plain", "compact") else weights
            return Formats(stored, stored, stored, stored)
        body = "fp8_block" if self.quantization == "fp8_block" else dtype
        return Formats(body, body, body, self.quantization or dtype)

    def stored(self, weights: str, dtype: str) -> str:
        """These in words, as bfloat16 and mxfp4."""
        return " and ".join(dict.fromkeys(self.formats(weights, dtype)))

    @property
    def kv_copies(self) -> int:
        """Devices that each have the K and V of a token: latents are whole on all that share a sequence, and so is
        a head where devices outnumber the heads.
        """
        return self.division.tensor if self.latent else max(1, self.division.tensor // self.num_kv_heads)

    def kv_spec(self, dtype: str, value_dtype: str | None = None) -> KVSpec:
        copies = self.kv_copies
        if self.latent is None:
            layers = self.attention_layers
            return KVSpec(layers, self.num_kv_heads, self.head_dim, dtype, value_dtype, copies=copies)
        return KVSpec(self.num_layers, 1, self.latent.rank + self.latent.rope, dtype, value_dim=0, copies=copies)

    def divided(self, executor: ExecutorConfig, name: str, tensor: int | None = None) -> SparseConfig:
        """On the devices of `executor`, or with `tensor` of them for a sequence. Raises ConfigError for what they
        cannot divide.
        """
        division = Division(
            tensor or executor.tensor_parallel, executor.attention_data_parallel, executor.expert_parallel
        )
        kv_heads, mixture, parts = self.num_kv_heads, self.experts, division.expert_tensor
        for key, count in (("attention_data_parallel", division.data), ("expert_parallel", division.experts)):
            if count > 1 and not mixture.layers:
                text = f"is for mixtures of experts, and {name} has no experts; leave it at 1"
                raise ConfigError(f"executor.{key}", count, text)
        if self.num_heads % division.tensor or (kv_heads % division.tensor and division.tensor % kv_heads):
            text = f"{name} has {self.num_heads} query heads and {kv_heads} KV heads, which it has to divide"
            raise ConfigError("executor.tensor_parallel", division.tensor, text)
        if self.linear is not None:
            self.linear.check_devices(name, division.tensor)
        if mixture.count % division.experts or division.devices % division.experts:
            text = f"has to divide the {mixture.count} experts of {name}, and the devices, of which there are"
            raise ConfigError("executor.expert_parallel", division.experts, f"{text} {division.devices}")
        stored = self.formats(executor.weights, executor.dtype).experts
        if mixture.size % parts or (stored == "fp8_block" and mixture.size // parts % FP8_BLOCK):
            whose = f"an expert of {name}" if mixture.layers else name
            text = f"{whose} has {mixture.size} intermediate numbers, which {parts} devices cannot divide"
            if stored == "fp8_block":
                text += f" into parts of {FP8_BLOCK}, each of which has a scale"
            if not mixture.layers:
                raise ConfigError("executor.tensor_parallel", division.tensor, text)
            instead = f"executor.expert_parallel={division.devices} divides the experts by number"
            raise ConfigError("executor.expert_parallel", division.experts, f"{text}; {instead}")
        return replace(self, division=division)


_FAMILY = Family({"tie_word_embeddings": False, "decoder_sparse_step": 1, "first_k_dense_replace": 0})


def is_mixture(model: object) -> bool:
    """Whether it has experts among which a token chooses."""
    return isinstance(model, SparseConfig) and model.experts.layers > 0


_LATENT = ("deepseek_v3", "kimi_k2")
_DENSE = ("qwen3_5", "qwen3_5_text")
LINEAR = (*_DENSE, "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
SPARSE = ("glm4_moe", "gpt_oss", "minimax_m2", "mixtral", "qwen3_moe", *_LATENT, *LINEAR)  # values of model_type
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # as families name them
#: Parts of attention, and those that NVIDIA's checkpoints in nvfp4 leave in 16 bits (hf_quant_config.json of
#: nvidia/MiniMax-M2.5-NVFP4, nvidia/Kimi-K2.5-NVFP4, nvidia/DeepSeek-V3.1-NVFP4 and R1-0528-FP4-v2).
_ATTENTION = ("attention", "output")
_NOT_NVFP4 = {"minimax_m2": _ATTENTION, "deepseek_v3": ("attention",), "kimi_k2": ("attention",)}


def read_sparse(config: Mapping[str, Any]) -> SparseConfig:
    """The model that the values of a config.json of one of `SPARSE` describe, on one device. Raises ConfigError for
    values that it cannot have.
    """
    family, values = str(config["model_type"]), Values(_FAMILY, language_model(config))
    counts = (values.count(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    layers, hidden, heads = counts
    latent, is_glm = _latent(values) if family in _LATENT else None, family == "glm4_moe"
    kv_heads = heads if latent else values.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError("num_key_value_heads", kv_heads, f"does not divide num_attention_heads={heads}")
    head_dim = latent.nope + latent.rope if latent else values.count("head_dim", default=hidden // heads)
    linear = read_linear(values) if family in LINEAR else None
    turned = int(head_dim * (_rotary_share(values) or 0.5)) if is_glm or linear else head_dim
    vocab_size, q, kv = values.count("vocab_size"), heads * head_dim, kv_heads * head_dim
    head_norms = 2 * head_dim if linear else {"qwen3_moe": 2 * head_dim, "minimax_m2": q + kv}.get(family, 0)
    if is_glm and values.flag("use_qk_norm"):
        head_norms = 2 * head_dim
    if latent:
        head_norms = (latent.query_rank or 0) + latent.rank
    biases = q + 2 * kv + (0 if is_glm else hidden) if values.flag("attention_bias") else 0
    if biases and latent:
        raise ConfigError("attention_bias", True, "latent attention has no biases here; only false")
    kinds = _layers(values, family, layers)
    own = sum(not layer.has_state for layer in kinds)
    gates = layers * hidden if linear and family not in _DENSE else 0  # of shared experts: a number for each token
    return SparseConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=values.count("intermediate_size", default=1 if linear else None),  # 1: all are mixtures
        layers=kinds,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        tie_word_embeddings=values.flag("tie_word_embeddings"),
        max_position_embeddings=values.count("max_position_embeddings"),
        eos_token_ids=eos_token_ids(values("eos_token_id"), vocab_size),
        qk_norm=bool(head_norms) and not latent,
        experts=_experts(values, family, layers),
        latent=latent,
        quantization=checkpoint_format(values),
        norm_numbers=layers * 2 * hidden + own * head_norms + hidden + gates,
        bias_numbers=layers * (biases + (heads if family == "gpt_oss" else 0)),
        rotary_dim=latent.rope if latent else values.count("rotary_dim", default=turned),
        linear=linear,
        has_gate=linear is not None,
    )


def _rotary_share(values: Values) -> float | None:
    """The share of a head's numbers that are turned, where it is given."""
    key, inner = "partial_rotary_factor", values("rope_parameters")
    of_angles = isinstance(inner, Mapping) and inner.get(key) is not None
    return (Values(values.family, inner) if of_angles else values).optional_number(key)


def _experts(values: Values, family: str, layers: int) -> Experts:
    if family in _DENSE:
        size = values.count("intermediate_size")
        return Experts(1, 1, size, 0, layers=0, has_biases=False, has_correction=False)
    key = next((key for key in _COUNTS if values(key) is not None), _COUNTS[0])
    count = values.count(key)
    active = values.count("num_experts_per_tok", most=count)
    own = family in ("glm4_moe", "qwen3_moe", *_LATENT, *LINEAR)
    size = values.count("moe_intermediate_size" if own else "intermediate_size")
    shared = values.count("n_shared_experts", default=0, least=0) * size
    if family in LINEAR:
        shared = values.count("shared_expert_intermediate_size", default=0, least=0)
    step, first = values.count("decoder_sparse_step"), values.count("first_k_dense_replace", least=0)
    dense = values("mlp_only_layers") or ()
    mixtures = sum(layer not in dense and (layer + 1) % step == 0 for layer in range(first, layers))
    correction = family in ("glm4_moe", "minimax_m2", *_LATENT)
    return Experts(count, active, size, shared, mixtures, family == "gpt_oss", correction)


def _latent(values: Values) -> Latent:
    rank = None if values("q_lora_rank") is None else values.count("q_lora_rank")
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return Latent(rank, *(values.count(key) for key in keys))


def _layers(values: Values, family: str, count: int) -> tuple[LayerConfig, ...]:
    """Full attention, or windows where `layer_types` says so; without types, where a window is in use."""
    if family in LINEAR:
        return tuple(LayerConfig(has_state=kind == "linear_attention") for kind in layer_kinds(values, count))
    kinds = values("layer_types")
    if kinds is None:
        sliding = family == "gpt_oss" or values.flag("use_sliding_window") or family == "mixtral"
        every = 2 if family == "gpt_oss" else 1  # which alternates, windows first
        windowed = sliding and values("sliding_window") is not None
        kinds = [
            "sliding_attention" if windowed and layer % every == 0 else "full_attention" for layer in range(count)
        ]
    if len(kinds) != count or set(kinds) - {"full_attention", "sliding_attention"}:
        text = f"has to name full_attention or sliding_attention for each of num_hidden_layers={count}"
        raise ConfigError("layer_types", kinds, text)
    window = values.count("sliding_window") if "sliding_attention" in kinds else None
    return tuple(LayerConfig(sliding_window=window if kind != "full_attention" else None) for kind in kinds)
