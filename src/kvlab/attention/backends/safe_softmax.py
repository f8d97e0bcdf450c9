"""Attention over blocks in two passes: the maximum and the sum first, then the weighted values."""

import torch

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.scores import ReadableAttention, SequenceInStep, weighted_values


@ATTENTION_BACKENDS.register("safe_softmax")
class SafeSoftmaxAttention(ReadableAttention):
    """Softmax made safe by subtracting the maximum, which the first pass over a sequence's blocks finds.

    No tensor as long as the sequence is needed: each pass reads each block once.
    """

    name = "safe_softmax"

    def attend(self, sequence: SequenceInStep) -> torch.Tensor:
        maximum = sinks = sequence.sink_scores()
        for k, _, first in sequence.blocks():
            maximum = torch.maximum(maximum, sequence.scores(k, first).amax(dim=-1, keepdim=True))
        total, weighted = torch.exp(sinks - maximum), sequence.full(sequence.spec.head_dim, 0.0)
        for k, v, first in sequence.blocks():
            weights = torch.exp(sequence.scores(k, first) - maximum)
            total += weights.sum(dim=-1, keepdim=True)
            weighted += weighted_values(weights, v)
        return weighted / total
