"""Mixtures of experts and latent attention (MLA), as plans and simulated devices know them: shapes, no layers.

transformers computes these families where an engine runs; what a serving framework stores of them on devices of its
own is described here, from the same values of a config.json, and needs neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from kvlab.config.executor import ExecutorConfig
from kvlab.errors import ConfigError
from kvlab.kv.spec import KVSpec
from kvlab.models.checkpoint_format import FP8_BLOCK
from kvlab.models.config import DecoderConfig
from kvlab.models.states import StateLayer


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
    has_gates: bool = True  # experts and all other feed-forwards: gate and up are of one size
    width: int | None = (
        None  # numbers that experts take and give, to which others project; None: the hidden state's
    )

    @property
    def inner(self) -> int:
        """Numbers that the products before the activation give, for each intermediate one."""
        return 1 + self.has_gates

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
    states: StateLayer | None = None  # of the layers that have a state; None: there are none
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
        return mixture.layers * mixture.active * self._expert

    def _parameters(self, experts: int) -> int:
        """With so many experts in each mixture; router and biases of all."""
        hidden, mixture = self.hidden_size, self.experts
        wide = self.dense_layers * self.intermediate_size + mixture.layers * mixture.shared
        dense = wide * (mixture.inner + 1) * hidden
        routers = mixture.layers * mixture.count * (hidden + mixture.has_correction + mixture.has_biases)
        each = self._expert + (2 * mixture.size + hidden if mixture.has_biases else 0)
        mixed = mixture.layers * (experts * each + (2 * hidden * mixture.width if mixture.width else 0))
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        attention = self.attention_layers * sum(outputs * inputs for outputs, inputs, _ in self.attention_matrices)
        if self.states is not None:
            matrices = sum(outputs * inputs for outputs, inputs, _ in self.states.matrices(hidden))
            attention += self.state_layers * (matrices + self.states.vectors)
        return attention + dense + routers + mixed + embeddings + self.norm_numbers + self.bias_numbers

    @property
    def expert_width(self) -> int:
        """Numbers that an expert takes and gives."""
        return self.experts.width or self.hidden_size

    @property
    def _expert(self) -> int:
        """Numbers of an expert's matrices."""
        return (self.experts.inner + 1) * self.expert_width * self.experts.size

    def layer_numbers(self, queries: int, keys: int) -> int:
        """Numbers that a layer holds for a token of its group on each device beside the residual stream: so many
        of all query and KV heads, or those of the experts' kernels, whichever is more. These hold, for each expert
        that computes the token, the products of gate and up, or, in their place, of down; and what gate and up make
        together. They have room for the tokens of all groups.
        """
        mixture, parts = self.experts, self.division.expert_tensor
        widest = max(mixture.inner * mixture.size // parts, self.expert_width)
        experts = mixture.active * (widest + mixture.size // parts)
        heads = (queries * self.num_heads + keys * self.num_kv_heads) * self.head_dim
        if self.states is not None:
            heads = max(heads, self.states.widest)
        return max(heads // self.division.tensor, experts * self.division.data)

    @property
    def states_called(self) -> str:
        return self.states.called if self.states else ""

    @property
    def state_layers(self) -> int:
        """Layers that have a state in place of K and V."""
        return sum(layer.has_state for layer in self.layers)

    @property
    def attention_layers(self) -> int:
        """Layers that have K and V, or a latent of both."""
        return self.windows.total()

    @property
    def dense_layers(self) -> int:
        """Layers whose feed-forward every token meets."""
        return self.num_parts - self.attention_layers - self.state_layers - self.experts.layers

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
        if self.states is not None:
            self.states.check_devices(name, division.tensor)
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


def is_mixture(model: object) -> bool:
    """Whether it has experts among which a token chooses."""
    return isinstance(model, SparseConfig) and model.experts.layers > 0


#: Parts of attention, and those that NVIDIA's checkpoints in nvfp4 leave in 16 bits (hf_quant_config.json of
#: nvidia/MiniMax-M2.5-NVFP4, nvidia/Kimi-K2.5-NVFP4, nvidia/DeepSeek-V3.1-NVFP4 and R1-0528-FP4-v2; Nemotron 3
#: Nano's leaves Mamba-2 before each of its attention, too, which is not told apart).
_ATTENTION = ("attention", "output")
_NOT_NVFP4 = {
    "minimax_m2": _ATTENTION,
    "nemotron_h": _ATTENTION,
    "deepseek_v3": ("attention",),
    "kimi_k2": ("attention",),
}
