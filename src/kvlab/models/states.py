"""Layers that keep a state of one size for each sequence in place of K and V for each token, as plans and simulated
devices know them: shapes, no layers. Each kind has a file: kvlab.models.linear, kvlab.models.mamba.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Protocol

from kvlab.errors import ConfigError
from kvlab.kv.spec import DTYPE_BYTES, KVSpec
from kvlab.models import linear, mamba
from kvlab.models.values import Family, Values

_KINDS = ((linear.KEYS, linear.read_linear), (mamba.KEYS, mamba.read_mamba))


class StateLayer(Protocol):
    """What is known of a layer of each kind."""

    called: ClassVar[str]  # in words, for messages
    flashinfer: ClassVar[bool]  # whether FlashInfer's kernels compute prompts, where there are any for a device

    def matrices(self, hidden: int) -> tuple[tuple[int, int, str], ...]:
        """Outputs and inputs of each, and the part of kvlab.models.sparse.Formats as which it is stored; empty: in
        16 bits in every format. The last gives the output: devices divide its inputs, and the others' outputs.
        """
        ...

    @property
    def vectors(self) -> int:
        """Numbers of all other weights."""
        ...

    @property
    def widest(self) -> int:
        """Numbers that the largest projection gives for a token."""
        ...

    def state_bytes(self, devices: int, element: int) -> int:
        """Of one sequence on each of so many devices; a number in the model's dtype has `element` bytes."""
        ...

    def check_devices(self, name: str, devices: int) -> None:
        """Raise ConfigError where so many cannot divide the heads."""
        ...


def block_of_state(
    states: StateLayer,
    kv_heads: int,
    head_dim: int,
    devices: int,
    dtype: str,
    kv_dtypes: tuple[str, str],
    *,
    multiple: int = 16,
) -> int:
    """Tokens of the smallest block that holds a state on each of so many devices, where layers with attention have
    so many heads of K and V: a `multiple` of 16, or of the 64 that FlashInfer's kernels compute at once, as vLLM
    takes it (`Platform._align_hybrid_block_size`).
    """
    layer = KVSpec(1, max(1, kv_heads // devices), head_dim, *kv_dtypes, tensor_scales=True)
    state = states.state_bytes(devices, DTYPE_BYTES[dtype])
    return multiple * -(-state // (multiple * layer.bytes_per_token))


def states_of(value: Callable[[str], Any]) -> StateLayer | None:
    """Of the `value` for each key of a config.json; None: it has no such layers, or no readable ones."""
    for keys, read in _KINDS:
        if value(keys[0]) is not None:  # each may read a file
            with suppress(ConfigError):
                return read(Values(Family({}), {key: value(key) for key in keys}))
    return None
