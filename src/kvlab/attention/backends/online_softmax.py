"""Attention over blocks in one pass, with a running maximum."""

import torch

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.scores import ReadableAttention, SequenceInStep, weighted_values


@ATTENTION_BACKENDS.register("online_softmax")
class OnlineSoftmaxAttention(ReadableAttention):
    """The online softmax (Milakov and Gimelshein, 2018) as FlashAttention and PagedAttention use it: each block
    is read once, and what was summed so far is rescaled whenever a block raises the maximum.
    """

    name = "online_softmax"

    def attend(self, sequence: SequenceInStep) -> torch.Tensor:
        maximum = sequence.sink_scores()
        total, weighted = (maximum > float("-inf")).float(), sequence.full(sequence.spec.head_dim, 0.0)
        for k, v, first in sequence.blocks():
            scores = sequence.scores(k, first)
            raised = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
            # A query that has seen no key yet (its window begins later) keeps a maximum of minus infinity. With an
            # anchor of zero its weights and its correction are 0 instead of NaN.
            anchor = raised.masked_fill(raised == float("-inf"), 0)
            correction = torch.exp(maximum - anchor)
            weights = torch.exp(scores - anchor)
            total = total * correction + weights.sum(dim=-1, keepdim=True)
            weighted = weighted * correction + weighted_values(weights, v)
            maximum = raised
        return weighted / total
