"""Shared by the readable backends, which compute one sequence after another in float32."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvlab.attention.base import AttentionBackend, AttentionSpec, Support
from kvlab.kv.view import CacheView


class BlockOfTokens(NamedTuple):
    """A sequence's tokens in one block: `k`, `v` `[kv_heads, keys, head_dim]`; the first is at position `first`."""

    k: torch.Tensor
    v: torch.Tensor
    first: int


class SequenceInStep(NamedTuple):
    """One sequence's queries `q` `[n, heads, head_dim]` at `positions` `[n]`, and where its blocks are."""

    q: torch.Tensor
    positions: torch.Tensor
    view: CacheView
    number: int  # of the sequence in the view
    layer: int
    spec: AttentionSpec
    sinks: torch.Tensor | None = None  # `[heads]`

    def blocks(self) -> Iterator[BlockOfTokens]:
        """The sequence's blocks in logical order, from the first that a query sees, the last one cut off at the
        sequence's end. Nothing is copied, except what is not stored as floating point numbers of its own, which is
        converted to float32.
        """
        size, length, window = self.view.block_size, self.view.lengths[self.number], self.spec.sliding_window
        seen = 0 if window is None else max(0, length - len(self.q) - window + 1) // size
        for entry, block in enumerate(self.view.blocks(self.number)[seen:], start=seen):
            first = entry * size
            k, v = self.view.read(self.layer, block, length - first)
            yield BlockOfTokens(k, v, first)

    def scores(self, k: torch.Tensor, first: int) -> torch.Tensor:
        """`[kv_heads, group, n, keys]` float32 scores against `k` `[kv_heads, keys, head_dim]`, whose first key is
        at position `first`; minus infinity for a key that a query does not see.
        """
        q, spec, positions = self.q, self.spec, self.positions[:, None]
        grouped = q.float().reshape(len(q), spec.num_kv_heads, spec.group, spec.head_dim)
        scores = torch.einsum("nhgd,hld->hgnl", grouped, k.float()) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        keys_at = torch.arange(first, first + k.shape[1], device=q.device)[None, :]
        hidden = torch.zeros(len(q), k.shape[1], dtype=torch.bool, device=q.device)
        if spec.causal:
            hidden |= keys_at > positions
        if spec.sliding_window is not None:
            hidden |= keys_at <= positions - spec.sliding_window
        return scores.masked_fill(hidden, float("-inf"))

    def sink_scores(self) -> torch.Tensor:
        """`[kv_heads, group, n, 1]` float32: the logit beside those of all keys; minus infinity: none."""
        if self.sinks is None:
            return self.full(1, float("-inf"))
        sinks = self.sinks.float().reshape(self.spec.num_kv_heads, self.spec.group, 1, 1)
        return sinks.expand(-1, -1, len(self.q), 1)

    def full(self, size: int, value: float) -> torch.Tensor:
        """`[kv_heads, group, n, size]` float32, all `value`."""
        return torch.full((self.spec.num_kv_heads, self.spec.group, len(self.q), size), value, device=self.q.device)


def weighted_values(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`[kv_heads, group, n, head_dim]`: `v` `[kv_heads, keys, head_dim]` summed with `weights`
    `[kv_heads, group, n, keys]`.
    """
    return torch.einsum("hgnl,hld->hgnd", weights, v.float())


class ReadableAttention(AttentionBackend):
    """A backend that computes one sequence after another, in float32."""

    takes_sinks = True

    def supports(self, spec: AttentionSpec) -> Support:
        return Support(True)

    def forward(
        self, q: torch.Tensor, view: CacheView, layer: int, spec: AttentionSpec, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        for number in range(view.num_sequences):
            new = slice(view.starts[number], view.starts[number + 1])
            attended = self.attend(SequenceInStep(q[new], view.positions[new], view, number, layer, spec, sinks))
            out[new] = attended.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
        return out

    @abstractmethod
    def attend(self, sequence: SequenceInStep) -> torch.Tensor:
        """Attention of a sequence's queries over its blocks, `[kv_heads, group, n, head_dim]`."""
