"""The decoder: one ragged forward pass over a flat batch, K and V in the cache."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch.nn import functional

from kvlab.attention.base import AttentionBackend, AttentionSpec, check_layout
from kvlab.kv.view import CacheView
from kvlab.models.config import DecoderConfig
from kvlab.models.layers import read_layer, read_norm
from kvlab.models.ops.base import Ops, StepContext, TopK
from kvlab.models.ops.torch_ops import TorchOps
from kvlab.models.rope import RotaryEmbedding
from kvlab.models.weights import WeightSource


class Model(Protocol):
    """What computes a flat batch over the cache."""

    def forward(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> torch.Tensor:
        """Run the flat batch `token_ids` `[T]` and store its K and V.

        Returns logits `[len(rows), vocab]`, in float32 where kvlab computes them, for the positions `rows` of the
        batch alone.
        """
        return self.logits(self.hidden(token_ids, view, rows))

    def forward_top1(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> TopK:
        """The same, but only the largest logit of each row and its index: the others need not be stored."""

    def hidden(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> torch.Tensor:
        """Run the batch as `forward` does. Returns what `logits` takes, `[len(rows), ...]`; `rows` ascend."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of some of these rows, so that not all of them need be stored."""


class Decoder(Model):
    """A decoder-only transformer over a paged cache.

    `attention` computes the `specs`, one for each layer (see `attention_specs`), and `ops` everything else (None:
    PyTorch). `max_positions` bounds the positions there are rotary angles for. Weights are taken from
    `weights` one by one and packed at once, so that building needs little more memory than the model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        attention: AttentionBackend,
        specs: Sequence[AttentionSpec],
        max_positions: int,
        ops: Ops | None = None,
    ) -> None:
        self.config = config
        self.attention = attention
        self.ops = ops = ops or TorchOps()
        vocabulary = (config.vocab_size, config.hidden_size)
        embedding = weights.take("model.embed_tokens.weight", vocabulary)
        dtype, device = embedding.dtype, embedding.device
        self._embed: Callable[[torch.Tensor], torch.Tensor]
        if config.tie_word_embeddings:
            self._lm_head = ops.linear(embedding, lookup=True)
            self._embed = self._lm_head.rows
        else:
            self._embed = partial(functional.embedding, weight=embedding)
        del embedding  # the output layer has a tied one, perhaps in another form
        # Rounded to the model's dtype, as the model was trained with.
        scale = config.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()
        ropes = [layer.rope for layer in config.layers]
        tables = (config.head_dim, max_positions, dtype, device)
        rotary = {rope: RotaryEmbedding(rope, *tables) for rope in dict.fromkeys(ropes)}
        self._rotary = tuple(rotary.values())
        self._layers = [
            read_layer(config, index, weights, ops, rotary[rope], spec)
            for index, (rope, spec) in enumerate(zip(ropes, specs, strict=True))
        ]
        self._norm = read_norm(weights, "model.norm", config.hidden_size, config)
        if not config.tie_word_embeddings:
            self._lm_head = ops.linear(weights.take("lm_head.weight", vocabulary))
        weights.finish()
        self._stack = ops.stack(self._layers, attention)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._capped(self._lm_head.logits(hidden))

    @torch.inference_mode()
    def forward_top1(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> TopK:
        x = self.hidden(token_ids, view, rows)
        if self.config.logit_soft_cap is None:
            return self.ops.linear_top1(self._lm_head, x)
        return self.ops.topk(self.logits(x))  # different logits may be equal after the cap

    @torch.inference_mode()
    def hidden(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> torch.Tensor:
        """The input of the output layer for `rows`, `[len(rows), hidden]`."""
        check_layout(self.attention, view)
        x = self._embed(token_ids)
        if self._embedding_scale is not None:
            x = x * self._embedding_scale
        if not self._layers:
            return self.ops.norm(x[rows], self._norm)
        if self._stack is None:
            residual, x = self._one_by_one(x, view)
            if len(rows) < len(token_ids):
                residual, x = residual[rows], x[rows]
        else:
            residual, x = self._stack(x, view, rows)
        return self.ops.add_norm(x, residual, self._norm)[1]

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _one_by_one(self, x: torch.Tensor, view: CacheView) -> tuple[torch.Tensor, torch.Tensor]:
        """The layers, part by part."""
        angles = {rotary: self.ops.angles(rotary, view.positions) for rotary in self._rotary}
        residual, step = x.float(), StepContext(view, self.attention, angles)
        for part in chain.from_iterable(self._layers):
            residual, x = part(residual, x, step)
        return residual, x
