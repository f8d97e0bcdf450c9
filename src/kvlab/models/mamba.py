"""Mamba-2 layers (Transformers are SSMs, 2024), which Nemotron-H has: a state of `state` numbers for each number of
each head, and the last inputs of a short convolution. The heads of a group share what writes to their states and
what reads them.
"""

from dataclasses import dataclass
from typing import ClassVar

from kvlab.errors import ConfigError
from kvlab.kv.spec import DTYPE_BYTES
from kvlab.models.values import Values

_COUNTS = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
_DTYPE = "mamba_ssm_cache_dtype"
_DTYPES = ("float32", "bfloat16", "float16", "auto")  # auto: the model's
KEYS = (*_COUNTS, _DTYPE)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Of a layer: heads, and their numbers."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int  # inputs that the convolution sees
    dtype: str = "float32"  # of states; auto: the model's
    has_bias: bool = True  # of the convolution

    called: ClassVar[str] = "Mamba-2"
    flashinfer: ClassVar[bool] = False

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Numbers of a token that the convolution sees: of the heads, and what groups write and read states by."""
        return self.inner + 2 * self.groups * self.state

    @property
    def widest(self) -> int:
        """With the gate, and a step's length for each head."""
        return self.inner + self.convolved + self.heads

    def matrices(self, hidden: int) -> tuple[tuple[int, int, str], ...]:
        """See StateLayer. NVIDIA's checkpoints store both as what every token meets."""
        return (self.widest, hidden, "dense"), (hidden, self.inner, "dense")

    @property
    def vectors(self) -> int:
        """Of the convolution, a norm, and decays, step lengths and what skips the state of each head."""
        return (self.kernel + self.has_bias) * self.convolved + self.inner + 3 * self.heads

    def state_element(self, element: int) -> int:
        """Bytes of a number of a state, where one in the model's dtype has `element`."""
        return element if self.dtype == "auto" else DTYPE_BYTES[self.dtype]

    def state_bytes(self, devices: int, element: int) -> int:
        """See StateLayer. A single group is on each device."""
        convolved = self.inner // devices + 2 * max(1, self.groups // devices) * self.state
        states = self.inner // devices * self.state * self.state_element(element)
        return (self.kernel - 1) * convolved * element + states

    def check_devices(self, name: str, devices: int) -> None:
        """See StateLayer."""
        if self.heads % devices or (self.groups % devices and self.groups > 1):
            has = f"{name} has {self.heads} heads in {self.groups} groups of Mamba-2"
            raise ConfigError("executor.tensor_parallel", devices, f"{has}, which it has to divide")


def read_mamba(values: Values) -> Mamba2:
    """Of a config.json. Raises ConfigError for a value of another type, and for an unknown dtype."""
    dtype = values(_DTYPE) or "float32"
    if dtype not in _DTYPES:
        raise ConfigError(_DTYPE, dtype, f"must be one of {', '.join(_DTYPES)}")
    has_bias = values("use_conv_bias") is None or values.flag("use_conv_bias")
    heads, head_dim, groups, state, kernel = map(values.count, _COUNTS)
    return Mamba2(heads, head_dim, groups, state, kernel, dtype, has_bias)
