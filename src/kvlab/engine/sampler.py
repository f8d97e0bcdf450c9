"""Picks the next token of each sequence from its logits."""

from __future__ import annotations

import torch

from kvlab.core import Sequence


class Sampler:
    """Greedy for the whole batch at once, temperature sampling with a generator of each request's own.

    A sampled token depends on the request's seed, the sample's and the token's index and the logits, and on nothing
    else: not on the other sequences, nor on whether the step was run before.
    """

    def __call__(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """One token id for each row of `logits` `[len(sequences), vocab]`."""
        if not sequences:
            return []
        # max is several times faster than argmax for bfloat16 on a CPU.
        tokens: list[int] = logits.max(dim=-1).indices.tolist()
        for row, sequence in enumerate(sequences):
            if sequence.request.sampling.temperature > 0:
                tokens[row] = self._draw(logits[row], sequence)
        return tokens

    @staticmethod
    def _draw(logits: torch.Tensor, sequence: Sequence) -> int:
        """Draw from softmax(logits / temperature) by exponential races: argmax of p_i / e_i."""
        sampling = sequence.request.sampling
        generator = torch.Generator()
        stream = (sampling.seed or 0) * 1_000_003 + sequence.index
        generator.manual_seed((stream * 1_000_003 + sequence.num_output_tokens) % 2**63)
        noise = torch.empty(len(logits), dtype=torch.float32).exponential_(generator=generator)
        scores = torch.softmax(logits.float() / sampling.temperature, dim=-1)
        return int((scores / noise.to(scores.device)).argmax())
