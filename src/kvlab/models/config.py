"""The options of the decoder, which describe the model families."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvlab.attention.base import AttentionSpec
from kvlab.errors import ConfigError
from kvlab.kv.spec import KVSpec

#: The gate's activations, by the names that transformers gives them.
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, 2021), stretched to longer contexts where `factor` is not 1.

    Without `original_max_position` every wavelength is stretched by `factor` (position interpolation, 2023). With
    it, as Llama 3.1 does: wavelengths longer than `original_max_position / low_freq_factor` are stretched, those
    shorter than `original_max_position / high_freq_factor` kept, and blended in between.
    """

    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The options that may differ between layers."""

    rope: RopeConfig = RopeConfig(10_000.0)
    sliding_window: int | None = None  # a token sees itself and the `sliding_window - 1` before it; None: all
    has_state: bool = False  # of a size of its own for each sequence, in place of K and V for each token
    is_feed_forward: bool = False  # and nothing else: it keeps nothing of a sequence


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shapes and options of a decoder-only transformer. The options' defaults are those of Llama."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float  # of the products of queries and keys
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    activation: str = "silu"  # of the gate; one of ACTIVATIONS
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output projection
    qk_norm: bool = False  # RMSNorm over each head of q and k
    norm_offset: bool = False  # norms multiply by 1 + weight
    sandwich_norms: bool = False  # also a norm behind attention and MLP, before the residual stream
    embedding_scale: float | None = None
    attention_soft_cap: float | None = None  # scores become cap * tanh(scores / cap)
    logit_soft_cap: float | None = None  # logits likewise

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def num_parts(self) -> int:
        """Additions to the residual stream: a layer has a feed-forward behind attention, or in place of it."""
        is_alone = any(layer.is_feed_forward for layer in self.layers)
        return self.num_layers if is_alone else 2 * self.num_layers

    @property
    def has_states(self) -> bool:
        """Whether some layers have a state for each sequence."""
        return bool(self.states_called)

    @property
    def states_called(self) -> str:
        """What layers with a state have, in words; empty: none has."""
        return ""

    @property
    def windows(self) -> Counter[int | None]:
        """How many layers with K and V for each token have each sliding window; None: they see all tokens."""
        return Counter(
            layer.sliding_window for layer in self.layers if not (layer.has_state or layer.is_feed_forward)
        )

    @property
    def initial_norm_weight(self) -> float:
        """The norm weight that scales by 1."""
        return 0.0 if self.norm_offset else 1.0

    @property
    def body_parameters(self) -> int:
        """Weights of the model but for the embedding and the output layer."""
        head = self.vocab_size * self.hidden_size
        return self.num_parameters - head * (1 if self.tie_word_embeddings else 2)

    @property
    def active_parameters(self) -> int:
        """Those of `body_parameters` that compute a token."""
        return self.body_parameters

    @property
    def num_parameters(self) -> int:
        """Weights of the model; tied embeddings count once."""
        hidden, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * hidden * (q + kv)
        attention += (q + 2 * kv if self.qkv_bias else 0) + (hidden if self.output_bias else 0)
        norms = (4 if self.sandwich_norms else 2) * hidden + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + 3 * hidden * self.intermediate_size + norms
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + hidden

    def kv_spec(self, dtype: str, value_dtype: str | None = None) -> KVSpec:
        """K and V of a token, as the cache stores them; V in `dtype` too unless it has one of its own."""
        return KVSpec(self.num_layers, self.num_kv_heads, self.head_dim, dtype, value_dtype)


def vocabulary_part(vocab_size: int, rank: int, size: int) -> range:
    """The token ids whose rows of embedding and output layer a rank has: equal parts, the last one shorter."""
    each = -(-vocab_size // size)
    return range(min(rank * each, vocab_size), min((rank + 1) * each, vocab_size))


def part_of(config: DecoderConfig, size: int, rank: int = 0) -> DecoderConfig:
    """The decoder that a rank computes, apart from its sums. Raises ConfigError for one that `size` does not
    divide.
    """
    for name, count in (
        ("KV heads", config.num_kv_heads),
        ("query heads", config.num_heads),
        ("columns in its MLP", config.intermediate_size),
    ):
        if count % size:
            most = max(n for n in range(1, size) if not (config.num_kv_heads % n or config.intermediate_size % n))
            text = f"{config.family} has {count} {name}, which cannot be divided so; {most} would do"
            raise ConfigError("executor.tensor_parallel", size, text)
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
        vocab_size=len(vocabulary_part(config.vocab_size, rank, size)),
    )


class WeightCounts(NamedTuple):
    """Numbers in a model's weights, each counted once."""

    body: int  # matrices of the layers
    rows: int  # of these matrices: their outputs
    output: int  # the output layer, which a tied embedding is, too
    embedding: int  # a table of its own beside the output layer; 0: tied
    norms: int  # and other vectors
    biases: int
    largest: int  # of one weight
    experts: int = 0  # of `body`: of experts that tokens choose among

    @property
    def total(self) -> int:
        """All of them."""
        return self.body + self.output + self.embedding + self.norms + self.biases


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(DecoderConfig):
    """A decoder that transformers computes, over kvlab's cache. The options of kvlab's own layers are not used."""

    values: str  # of config.json, as JSON
    value_dim: int  # of a head's V, which the cache holds in `head_dim` numbers like those of its K
    counts: WeightCounts
    has_sinks: bool = False  # see AttentionSpec

    @property
    def num_parameters(self) -> int:
        return self.counts.total


def eos_token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    """The ids that end a sequence: none, one, or a list of them."""
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            reason = f"has to be null, or token ids of the vocabulary, 0 to {vocab_size - 1}"
            raise ConfigError("eos_token_id", value, reason)
    return tuple(ids)


def attention_specs(
    config: DecoderConfig, dtype: str, device: str, kv_dtypes: tuple[str, str] | None = None
) -> tuple[AttentionSpec, ...]:
    """The attention of each of the decoder's layers. `kv_dtypes` are the formats of K and V; None: `dtype`."""
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
            has_sinks=isinstance(config, TransformersConfig) and config.has_sinks,
            kv_dtypes=kv_dtypes or (dtype, dtype),
        )
        for layer in config.layers
    )
