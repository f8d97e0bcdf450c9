"""A decoder split among ranks, processes that compute it together (tensor parallelism: Megatron-LM, 2019).

Each rank has a part of the heads, with their K and V, of the MLP's columns and of the vocabulary. What attention
and MLP give is summed over the ranks in float32, so that it is rounded once, as in one process. Norms and the
residual stream are the same on every rank.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch.nn import functional

from kvlab.attention.base import AttentionBackend, AttentionSpec
from kvlab.kv.view import CacheView
from kvlab.models.config import DecoderConfig, part_of, vocabulary_part
from kvlab.models.decoder import Decoder
from kvlab.models.layers import AttentionPart, MlpPart
from kvlab.models.ops.base import LayerPart, Linear, Ops, TopK
from kvlab.models.weights import WeightSource

_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # whose outputs are divided
_INPUTS = ("o_proj", "down_proj")  # whose inputs are divided
_VOCABULARY = ("embed_tokens", "lm_head")


class Ranks(Protocol):
    """The ranks, as one of them sees them. All call the same methods in the same order."""

    rank: int  # this one's number, from 0
    size: int

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over all ranks, in its place."""

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """On rank 0 the `x` of all ranks, which have one shape, in order; elsewhere this rank's own."""


class PartialWeights(WeightSource):
    """A rank's part of the weights of another source, which gives whole ones."""

    def __init__(self, source: WeightSource, config: DecoderConfig, ranks: Ranks) -> None:
        self._source, self._config, self._rank, self._size = source, config, ranks.rank, ranks.size

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See WeightSource; `shape` is that of the part. The bias of a divided sum is rank 0's, and 0 elsewhere."""
        module, kind = name.split(".")[-2:]
        if module in _VOCABULARY:
            rows = vocabulary_part(self._config.vocab_size, self._rank, self._size)
            whole = self._source.take(name, (self._config.vocab_size, *shape[1:]))
            return whole[rows.start : rows.stop].clone()
        if module in _OUTPUTS:
            whole = self._source.take(name, (shape[0] * self._size, *shape[1:]))
            return whole.chunk(self._size)[self._rank].clone()
        if module in _INPUTS and kind == "weight":
            whole = self._source.take(name, (shape[0], shape[1] * self._size))
            return whole.chunk(self._size, dim=1)[self._rank].contiguous()
        whole = self._source.take(name, shape)
        return torch.zeros_like(whole) if module in _INPUTS and self._rank else whole

    def finish(self) -> None:
        self._source.finish()


class SummedLinear(Linear):
    """A product whose inputs are divided: the sum of what the ranks have, rounded once."""

    def __init__(self, own: Linear, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x).to(x.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._ranks.add(self._own.logits(x))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no process has whole rows")


class SplitDecoder(Decoder):
    """One rank's part of a decoder. All ranks run the same batches. Each has whole hidden states, and rank 0 whole
    logits. `specs` are those of all heads; the cache has K and V of the rank's own.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        attention: AttentionBackend,
        specs: Sequence[AttentionSpec],
        max_positions: int,
        ops: Ops,
        ranks: Ranks,
    ) -> None:
        part = part_of(config, ranks.size, ranks.rank)
        own = [replace(spec, num_heads=part.num_heads, num_kv_heads=part.num_kv_heads) for spec in specs]
        super().__init__(part, PartialWeights(weights, config, ranks), attention, own, max_positions, ops)
        self._ranks, self._vocab_size = ranks, config.vocab_size
        self._tokens = vocabulary_part(config.vocab_size, ranks.rank, ranks.size)
        self._own_rows, self._embed = self._embed, self._look_up
        self._layers = [tuple(_summed(part, ranks) for part in layer) for layer in self._layers]
        if self._stack is not None:
            self._stack.sum_with(ranks.add)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        missing = -(-self._vocab_size // self._ranks.size) - len(self._tokens)
        own = functional.pad(self._lm_head.logits(hidden), (0, missing))
        return self._capped(torch.cat(self._ranks.gather(own), dim=1)[:, : self._vocab_size].contiguous())

    @torch.inference_mode()
    def forward_top1(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> TopK:
        x = self.hidden(token_ids, view, rows)
        if self.config.logit_soft_cap is not None:
            return self.ops.topk(self.logits(x))
        values, indices = self.ops.linear_top1(self._lm_head, x)
        own = torch.cat([values.double(), (indices + self._tokens.start).double()], dim=1)  # float64 holds both
        values, indices = torch.stack(self._ranks.gather(own), dim=2).unbind(1)
        best = self.ops.topk(values.float().contiguous())
        return TopK(best.values, indices.gather(1, best.indices).long())

    def _look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, each of which one rank has."""
        own = (token_ids >= self._tokens.start) & (token_ids < self._tokens.stop)
        rows = self._own_rows((token_ids - self._tokens.start).clamp(0, len(self._tokens) - 1))
        return self._ranks.add(rows.float() * own[:, None]).to(rows.dtype)


def _summed(part: LayerPart, ranks: Ranks) -> LayerPart:
    if isinstance(part, AttentionPart):
        return replace(part, out=SummedLinear(part.out, ranks))
    return replace(part, down=SummedLinear(part.down, ranks)) if isinstance(part, MlpPart) else part
