"""Ops: the contract for everything that a decoder computes apart from attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

    from kvlab.attention.base import AttentionBackend
    from kvlab.kv.view import CacheView
    from kvlab.models.rope import Angles, RotaryEmbedding


#: Bytes of a part of a weight in float32 and of its products, where PyTorch multiplies bfloat16 in float32.
PART_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm, x / rms(x) * weight over the last dimension, computed in float32 (Zhang and Sennrich, 2019).

    A weight may be float32 although the model is in half precision: the sum of a `1 + w` would lose most digits of
    a small w.
    """

    weight: torch.Tensor
    eps: float


class Linear(Protocol):
    """y = x W^T + b for a weight `[out_features, in_features]`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in_features]` to `[T, out_features]`."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float32, where this can be had not rounded: logits that differ little stay different."""
        return self(x).float()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` `[n]` of the weight, `[n, in_features]`: the look-up of a tied embedding. Only for a weight
        that was made with `lookup`.
        """


class StepContext(NamedTuple):
    """The step that runs, as the parts of a layer need it."""

    view: CacheView
    attention: AttentionBackend
    angles: Mapping[RotaryEmbedding, Angles]  # of every rotary table of the model


#: What the parts of a layer pass on, both `[T, hidden]`: the residual stream, in float32, and x, the latest result,
#: which is yet to be added to the stream. So an addition and the norm behind it can be one pass.
ResidualAndX: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


class LayerPart(Protocol):
    """One operation of a decoder layer; a layer is a sequence of them (kvlab.models.layers)."""

    def __call__(self, residual: torch.Tensor, x: torch.Tensor, step: StepContext) -> ResidualAndX:
        """The residual stream and x behind this part, which may overwrite the tensors it is given."""


class Stack(Protocol):
    """All layers of a decoder at once."""

    def __call__(self, x: torch.Tensor, view: CacheView, rows: torch.Tensor) -> ResidualAndX:
        """From embeddings `x` `[T, hidden]`: the `rows` (all in order, or fewer) of the residual stream and of x
        behind the last part, `[len(rows), hidden]` both. The stack may overwrite `x`, and its next call overwrites
        both results.
        """

    def sum_with(self, add: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let what attention and MLP give be a part of a sum: `add` returns the whole of it, in float32."""


class TopK(NamedTuple):
    """The largest numbers of each row and their indices, both `[rows, count]`: the largest first, and of equal
    ones the lowest index first. NaN counts as the largest.
    """

    values: torch.Tensor  # of the dtype of what they were taken from
    indices: torch.Tensor  # int64


class LogitsOps(Protocol):
    """The operations that sampling needs."""

    def topk(self, x: torch.Tensor, count: int = 1) -> TopK:
        """The `count` largest numbers of each row of `x` `[rows, size]`, 1 <= count <= size."""


class Ops(LogitsOps, Protocol):
    """The arithmetic between and around attention. Half precision is rounded where a tensor is stored, but for the
    residual stream, which is float32.
    """

    name: str  # with the instruction set, where there is a choice
    reason: str = ""  # why these instructions were chosen
    weights: str = "plain"  # how matrices are stored: plain, compact, int8 or int8_w8a8

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, lookup: bool = False) -> Linear:
        """A product with `weight`, which may be stored in another form; with `lookup` its rows can be read, too."""

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """RMSNorm of `x` `[..., size]`."""

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual` + `x`, in float32 as `residual` is, and the norm of the sum in the type of `x`, both `[T,
        hidden]`; the sum may overwrite `residual`.
        """

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """activation(gate) * up for the halves of `[T, 2 * size]`; silu or gelu_pytorch_tanh."""

    def angles(self, rotary: RotaryEmbedding, positions: torch.Tensor) -> Angles:
        """The angles that `rotate_and_store` takes. Called once per rotary table and step."""

    def rotate_and_store(
        self, qkv: torch.Tensor, norms: tuple[Norm, Norm] | None, angles: Angles, view: CacheView, layer: int
    ) -> torch.Tensor:
        """Norm the queries and keys of `qkv` `[T, heads + 2 * kv_heads, head_dim]` by `norms`, rotate them, and
        store keys and values in the view. Returns the queries `[T, heads, head_dim]`.
        """

    def linear_top1(self, linear: Linear, x: torch.Tensor) -> TopK:
        """The largest number of each row of `linear.logits(x)`, as `topk` finds it; no other need be stored."""
        return self.topk(linear.logits(x))

    def stack(self, layers: Sequence[Sequence[LayerPart]], attention: AttentionBackend) -> Stack | None:
        """The layers of a decoder, each a sequence of parts, as one operation with the same results. None where a
        part is unknown or cannot be computed so: the parts then run one by one.
        """
        return None
