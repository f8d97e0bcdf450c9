"""The contract of an attention backend, and the spec of what it computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvlab.errors import BackendError
from kvlab.kv.spec import PageLayout

if TYPE_CHECKING:
    import torch

    from kvlab.kv.view import CacheView


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One kind of attention layer. Query head `i` reads KV head `i // group`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: str
    device: str
    causal: bool = True
    sliding_window: int | None = None  # a token sees itself and the `sliding_window - 1` before it
    soft_cap: float | None = None
    has_sinks: bool = False  # each query head has a logit beside those of its keys, of no value (gpt-oss)
    kv_dtypes: tuple[str, str] | None = None  # of K and V in the cache, as "int8" or "fp8_e4m3"; None: `dtype`

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def formats(self) -> set[str]:
        """The formats of K and V other than `dtype`, which a backend has to convert."""
        return set(self.kv_dtypes or ()) - {self.dtype}


class Support(NamedTuple):
    """Whether a backend can compute a spec. `reason` says why not; or, where `ok`, why `auto` should prefer
    another.
    """

    ok: bool
    reason: str = ""


class AttentionBackend(ABC):
    """Computes attention of a step's queries over the cache."""

    name: str
    preference = 0  # `auto` tries the backends from the highest to the lowest
    takes_sinks = False  # `forward` has `sinks` as its last parameter; others are never asked for them
    is_kernel = False  # reads K and V where they lie; `executor.kernels=false` leaves it out
    #: How K and V are to be laid out in memory: the cache of an engine is allocated so. `view.keys(layer)` is
    #: indexed `[blocks, kv_heads, block_size, head_dim]` in any layout.
    layout: PageLayout = PageLayout.HND
    #: Bytes that the largest step of a model with these settings needs (see `planning/memory.py`); None: no own.
    working_bytes: ClassVar[Callable[[Any, Any], int] | None] = None

    @abstractmethod
    def supports(self, spec: AttentionSpec) -> Support:
        """Whether `forward` can compute this spec."""

    @abstractmethod
    def forward(self, q: torch.Tensor, view: CacheView, layer: int, spec: AttentionSpec) -> torch.Tensor:
        """Attention of `q` `[T, num_heads, head_dim]` over each query's own sequence.

        The step's K and V are stored already. Returns `[T, num_heads, head_dim]`.
        """


def check_layout(backend: AttentionBackend, view: CacheView) -> None:
    """Raise BackendError unless the cache is laid out as the backend wants it."""
    if view.storage.layout is not (wanted := backend.layout):
        raise BackendError(
            f"attention={backend.name} reads K and V laid out as {wanted}, and this cache is laid out as "
            f"{view.storage.layout}; allocate it in the backend's layout"
        )


def check_attended(backend: AttentionBackend, attended: object, q: torch.Tensor) -> None:
    """Raise BackendError unless a backend returned what is shaped as `q`: kernels behind it read as many bytes."""
    shape, dtype = getattr(attended, "shape", None), getattr(attended, "dtype", None)
    if shape != q.shape or dtype != q.dtype:
        found = type(attended).__name__ if shape is None else f"{list(shape)} in {dtype}"
        text = f"attention={backend.name} returned {found}; forward returns {list(q.shape)} in {q.dtype}, as q is"
        raise BackendError(text)
