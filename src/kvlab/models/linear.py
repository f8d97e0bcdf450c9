"""Linear attention by the gated delta rule, as plans and simulated devices know it: shapes, no layers.

Such a layer keeps a state of one size for each sequence in place of K and V for each token: a matrix for each value
head, and the last inputs of a short convolution (Gated Delta Networks, 2024; Qwen3-Next and Qwen3.5).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvlab.errors import ConfigError
from kvlab.models.values import Values

_STATE_BYTES = 4  # of a number of the matrices, which stay in float32 (mamba_ssm_dtype)
_EVERY = 4  # layers, of which the last has full attention, where neither types nor an interval are given
KEYS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class Linear:
    """Of a layer: heads of keys and of values, and their numbers."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # inputs that the convolution sees

    called: ClassVar[str] = "linear attention"
    flashinfer: ClassVar[bool] = True

    @property
    def keys(self) -> int:
        """Numbers of the keys of all heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of the values of all heads."""
        return self.value_heads * self.value_dim

    @property
    def widest(self) -> int:
        """Of queries, keys, values and their gate."""
        return 2 * (self.keys + self.values)

    def matrices(self, hidden: int) -> tuple[tuple[int, int, str], ...]:
        """See StateLayer: that of queries, keys, values and their gate; that of two numbers for each value head;
        and that of the output.
        """
        return (
            (self.widest, hidden, "attention"),
            (2 * self.value_heads, hidden, ""),
            (hidden, self.values, "output"),
        )

    @property
    def vectors(self) -> int:
        """Of the convolution, of decays and their biases, and of a norm over a value head."""
        return self.kernel * (2 * self.keys + self.values) + 2 * self.value_heads + self.value_dim

    def state_bytes(self, devices: int, element: int) -> int:
        """See StateLayer: of inputs of the convolution, and of matrices."""
        inputs = (self.kernel - 1) * (2 * self.keys + self.values) * element
        return (inputs + self.value_heads * self.value_dim * self.key_dim * _STATE_BYTES) // devices

    def check_devices(self, name: str, devices: int) -> None:
        """See StateLayer."""
        if self.key_heads % devices or self.value_heads % devices:
            has = f"{name} has {self.key_heads} key heads and {self.value_heads} value heads of linear attention"
            raise ConfigError("executor.tensor_parallel", devices, f"{has}, which it has to divide")


def read_linear(values: Values) -> Linear:
    """Of a config.json. Raises ConfigError for a value of another type."""
    return Linear(*map(values.count, KEYS))


def layer_kinds(values: Values, layers: int) -> list[str]:
    """`linear_attention` or `full_attention` of each layer. Raises ConfigError for others."""
    kinds = values("layer_types")
    if kinds is None:
        every = values.count("full_attention_interval", default=_EVERY)
        kinds = [_KINDS[(layer + 1) % every == 0] for layer in range(layers)]
    is_known = isinstance(kinds, list | tuple) and all(kind in _KINDS for kind in kinds)
    if not is_known or len(kinds) != layers or len(set(kinds)) < len(_KINDS):
        text = f"has to name {' or '.join(_KINDS)}, each once or more, for each of num_hidden_layers={layers}"
        raise ConfigError("layer_types", kinds, text)
    return list(kinds)


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of the language model of a multimodal one."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    return {
        **{key: config[key] for key in ("quantization_config", "tie_word_embeddings") if key in config},
        **inner,
    }
