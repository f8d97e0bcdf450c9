"""Reads Nemotron-H, whose layers each have Mamba-2, attention or a feed-forward, from the values of a config.json.

Attention turns nothing by positions, and feed-forwards have no gates. In some of these models (Nemotron 3 Super and
Ultra) experts take and give fewer numbers than the hidden state has.
"""

from kvlab.errors import ConfigError
from kvlab.models.checkpoint_format import checkpoint_format
from kvlab.models.config import LayerConfig, eos_token_ids
from kvlab.models.mamba import read_mamba
from kvlab.models.sparse import Experts, SparseConfig
from kvlab.models.values import Values

_PATTERN, _TYPES = "hybrid_override_pattern", "layers_block_type"
_LAYERS = {
    "mamba": LayerConfig(has_state=True),
    "attention": LayerConfig(),
    "mlp": LayerConfig(is_feed_forward=True),
    "moe": LayerConfig(is_feed_forward=True),
}
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of a pattern
_NAMES = {**_LETTERS, "linear_attention": "mamba", "full_attention": "attention"}  # as transformers 5 writes them
_BIASES = ("attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias")


def read_nemotron(values: Values) -> SparseConfig:
    """The model on one device. Raises ConfigError for values that it cannot have."""
    hidden, heads, vocab_size = map(values.count, ("hidden_size", "num_attention_heads", "vocab_size"))
    kv_heads = values.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError("num_key_value_heads", kv_heads, f"does not divide num_attention_heads={heads}")
    for key in _BIASES:
        if values.flag(key):
            raise ConfigError(key, True, "products have no biases here; only false")
    names, head_dim = _layer_names(values), values.count("head_dim", default=hidden // heads)
    return SparseConfig(
        family="nemotron_h",
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=values.count("intermediate_size", default=1),  # 1: all are mixtures
        layers=tuple(_LAYERS[name] for name in names),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        tie_word_embeddings=values.flag("tie_word_embeddings"),
        max_position_embeddings=values.count("max_position_embeddings"),
        eos_token_ids=eos_token_ids(values("eos_token_id"), vocab_size),
        experts=_experts(values, names.count("moe")),
        latent=None,
        quantization=checkpoint_format(values),
        norm_numbers=(len(names) + 1) * hidden,
        bias_numbers=0,
        rotary_dim=0,
        states=read_mamba(values),
    )


def _experts(values: Values, layers: int) -> Experts:
    if not layers:
        size = values.count("intermediate_size")
        return Experts(1, 1, size, 0, layers=0, has_biases=False, has_correction=False, has_gates=False)
    count, size = values.count("n_routed_experts"), values.count("moe_intermediate_size")
    shared = values.count("n_shared_experts", default=0, least=0)
    if shared:
        shared *= values.count("moe_shared_expert_intermediate_size", least=0)
    return Experts(
        count,
        values.count("num_experts_per_tok", most=count),
        size,
        shared,
        layers,
        has_biases=False,
        has_correction=True,
        has_gates=False,
        width=None if values("moe_latent_size") is None else values.count("moe_latent_size"),
    )


def _layer_names(values: Values) -> list[str]:
    """What each layer is. Raises ConfigError for others, and where none has attention or none Mamba-2."""
    key = _PATTERN if values(_TYPES) is None else _TYPES
    given = values(key)
    if isinstance(given, str | list | tuple) and all(isinstance(name, str) for name in given):
        names = [_NAMES.get(name, name) for name in given]
        is_whole = len(names) == values.count("num_hidden_layers", default=len(names) or 1)
        if is_whole and {"mamba", "attention"} <= set(names) <= set(_LAYERS):
            return names
    letters = ", ".join(f"{letter} for {name}" for letter, name in _LETTERS.items())
    text = "has to name all of num_hidden_layers, some of them with Mamba-2 and some with attention"
    raise ConfigError(key, given, f"{text}: {letters}")
