"""Picks the next token of each sequence from its logits."""

from __future__ import annotations

import torch

from kvlab.core import Sequence, TokenLogprobs
from kvlab.engine.logits import (
    apply_temperature,
    bar,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
)
from kvlab.engine.randomness import uniforms
from kvlab.errors import SamplingError


class Sampler:
    """Greedy or by chance, the whole batch at once.

    A sampled token depends on the request's seed, the sample's and the token's index and the logits, and on nothing
    else: not on the other sequences, nor on whether the step was run before.
    """

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """One token id for each row of `logits` `[len(sequences), vocab]`; log-probabilities, where a request asks
        for them, are left in its sequence's `next_logprobs`. Raises SamplingError for logits that are no numbers.
        """
        if not sequences:
            return []
        # max is several times faster than argmax for bfloat16 on a CPU.
        best, choice = logits.max(dim=-1)
        _check(~best.isfinite(), sequences)
        tokens: list[int] = choice.tolist()
        rows = [row for row, sequence in enumerate(sequences) if not _takes_the_best(sequence)]
        if rows:
            picked = self._pick(logits[rows].float(), [sequences[row] for row in rows])
            for row, token in zip(rows, picked, strict=True):
                tokens[row] = token
        self._note_logprobs(logits, tokens, sequences)
        return tokens

    def _pick(self, scores: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """A token for each row of `scores`, which are changed on the way."""
        asked = [sequence.request.sampling for sequence in sequences]
        penalize_repetition(scores, [a.repetition_penalty for a in asked], [s.token_ids for s in sequences])
        bar(scores, [s.stop_token_ids if _is_too_short(s) else () for s in sequences])
        best, choice = scores.max(dim=-1)
        _check(~best.isfinite(), sequences)
        tokens: list[int] = choice.tolist()
        rows = [row for row, each in enumerate(asked) if each.temperature > 0]
        if rows:
            scores = scores if len(rows) == len(asked) else scores[rows]
            chosen, asked = [sequences[row] for row in rows], [asked[row] for row in rows]
            apply_temperature(scores, [a.temperature for a in asked])
            keep_top_k(scores, [a.top_k for a in asked])
            keep_top_p(scores, [a.top_p for a in asked])
            keep_min_p(scores, [a.min_p for a in asked])
            numbers = uniforms(
                [a.seed or 0 for a in asked],
                [s.index for s in chosen],
                [s.num_output_tokens for s in chosen],
            )
            drawn = draw(scores, torch.from_numpy(numbers).to(scores.device)).tolist()
            for row, token in zip(rows, drawn, strict=True):
                tokens[row] = token
        return tokens

    def _note_logprobs(self, logits: torch.Tensor, tokens: list[int], sequences: list[Sequence]) -> None:
        wanted = [(row, s, s.request.sampling.logprobs) for row, s in enumerate(sequences)]
        asked = [(row, sequence, count) for row, sequence, count in wanted if count is not None]
        if not asked:
            return
        rows = [row for row, _, _ in asked]
        logprobs = logits[rows].float().log_softmax(dim=-1)
        picked = torch.tensor([tokens[row] for row in rows], device=logits.device)
        own = logprobs.gather(1, picked[:, None]).flatten().tolist()
        top = logprobs.topk(min(max(count for _, _, count in asked), logits.shape[1]))
        values, ids = top.values.tolist(), top.indices.tolist()
        for row, (_, sequence, count) in enumerate(asked):
            pairs = zip(ids[row][:count], values[row][:count], strict=True)
            sequence.next_logprobs = TokenLogprobs(own[row], tuple(pairs))


def _takes_the_best(sequence: Sequence) -> bool:
    """Whether its token is that of the largest logit, whatever it is."""
    sampling = sequence.request.sampling
    return sampling.temperature == 0 and sampling.repetition_penalty == 1 and not _is_too_short(sequence)


def _is_too_short(sequence: Sequence) -> bool:
    return sequence.num_output_tokens < sequence.request.sampling.min_tokens


def _check(unsound: torch.Tensor, sequences: list[Sequence]) -> None:
    """Raise SamplingError naming the requests of the rows that `unsound` `[rows]` marks."""
    if bool(unsound.any()):
        rows = unsound.nonzero().flatten().tolist()
        raise SamplingError(sorted({sequences[row].request.request_id for row in rows}))
