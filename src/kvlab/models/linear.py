"""Linear attention by the gated delta rule, as plans and simulated devices know it: shapes, no layers.

Such a layer keeps a state of one size for each sequence in place of K and V for each token: a matrix for each value
head, and the last inputs of a short convolution (Gated Delta Networks, 2024; Qwen3-Next and Qwen3.5).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.errors import ConfigError
from kvlab.kv.spec import DTYPE_BYTES, KVSpec
from kvlab.models.values import Values

_STATE_BYTES = 4  # of a number of the matrices, which stay in float32 (mamba_ssm_dtype)
_EVERY = 4  # layers, of which the last has full attention, where neither types nor an interval are given
_KEYS = (
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

    @property
    def keys(self) -> int:
        """Numbers of the keys of all heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of the values of all heads."""
        return self.value_heads * self.value_dim

    def matrices(self, hidden: int) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of each: that of queries, keys, values and their gate; that of two numbers for each
        value head; and that of the output.
        """
        return (2 * (self.keys + self.values), hidden), (2 * self.value_heads, hidden), (hidden, self.values)

    @property
    def vectors(self) -> int:
        """Numbers of the convolution, of decays and their biases, and of a norm over a value head."""
        return self.kernel * (2 * self.keys + self.values) + 2 * self.value_heads + self.value_dim

    def state_bytes(self, devices: int, element: int) -> int:
        """Of one sequence on each of so many devices; inputs of the convolution have `element` bytes."""
        inputs = (self.kernel - 1) * (2 * self.keys + self.values) * element
        return (inputs + self.value_heads * self.value_dim * self.key_dim * _STATE_BYTES) // devices

    def check_devices(self, name: str, devices: int) -> None:
        """Raise ConfigError where the heads cannot be divided among so many."""
        if self.key_heads % devices or self.value_heads % devices:
            has = f"{name} has {self.key_heads} key heads and {self.value_heads} value heads of linear attention"
            raise ConfigError("executor.tensor_parallel", devices, f"{has}, which it has to divide")


def block_of_state(
    linear: Linear,
    kv_heads: int,
    head_dim: int,
    devices: int,
    dtype: str,
    kv_dtypes: tuple[str, str],
    *,
    multiple: int,
) -> int:
    """Tokens of the smallest block that holds a state on each of so many devices, where layers with attention have
    so many heads of K and V: a `multiple` of 16, or of the 64 that FlashInfer's kernels compute at once, as vLLM
    takes it (`Platform._align_hybrid_block_size`).
    """
    layer = KVSpec(1, max(1, kv_heads // devices), head_dim, *kv_dtypes, tensor_scales=True)
    state = linear.state_bytes(devices, DTYPE_BYTES[dtype])
    return multiple * -(-state // (multiple * layer.bytes_per_token))


def linear_of(number: Callable[[str], int | None]) -> Linear | None:
    """Of the `number` for each key of a config.json; None: it has no such layers."""
    if number(_KEYS[0]) is None:  # each may read a file
        return None
    numbers = [value for value in map(number, _KEYS) if value is not None and value > 0]
    return Linear(*numbers) if len(numbers) == len(_KEYS) else None


def read_linear(values: Values) -> Linear:
    """Of a config.json. Raises ConfigError for a value of another type."""
    return Linear(*map(values.count, _KEYS))


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
