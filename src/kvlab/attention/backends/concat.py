"""Textbook attention: concatenate a sequence's blocks, then softmax(Q K^T) V. The reference for the others."""

import torch

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.scores import ReadableAttention, SequenceInStep, weighted_values


@ATTENTION_BACKENDS.register("concat")
class ConcatAttention(ReadableAttention):
    """Plain attention over the whole sequence at once."""

    name = "concat"

    def attend(self, sequence: SequenceInStep) -> torch.Tensor:
        blocks = list(sequence.blocks())
        k = torch.cat([block.k for block in blocks], dim=1)
        v = torch.cat([block.v for block in blocks], dim=1)
        scores = sequence.scores(k, blocks[0].first)
        if sequence.sinks is not None:
            scores = torch.cat([scores, sequence.sink_scores()], dim=-1)
        return weighted_values(torch.softmax(scores, dim=-1)[..., : k.shape[1]], v)
