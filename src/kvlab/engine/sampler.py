"""Picks the next token of each sequence from its logits."""

from __future__ import annotations

from math import isfinite

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
    shortlist,
)
from kvlab.engine.randomness import uniforms
from kvlab.errors import SamplingError
from kvlab.models.ops.base import LogitsOps, TopK
from kvlab.models.ops.torch_ops import TorchOps


class Sampler:
    """Greedy or by chance, the whole batch at once.

    A sampled token depends on the request's seed, the sample's and the token's index and the logits, and on nothing
    else: not on the other sequences, nor on whether the step was run before. Of equal logits the first is the best.
    """

    def __init__(self, ops: LogitsOps | None = None) -> None:
        self._ops = ops or TorchOps()

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """One token id for each row of `logits` `[len(sequences), vocab]`; log-probabilities, where a request asks
        for them, are left in its sequence's `next_logprobs`. Raises SamplingError for logits that are no numbers.
        """
        if not sequences:
            return []
        tokens = self._best(logits, sequences)
        rows = [row for row, sequence in enumerate(sequences) if not _takes_the_best(sequence)]
        if rows:
            scores = logits[rows] if len(rows) < len(sequences) else logits
            picked = self._pick(scores.to(torch.float32, copy=True), [sequences[row] for row in rows])
            for row, token in zip(rows, picked, strict=True):
                tokens[row] = token
        self._note_logprobs(logits, tokens, sequences)
        return tokens

    def is_greedy(self, sequences: list[Sequence]) -> bool:
        """Whether `take` does for these: none asks for more than the token of its largest logit."""
        return all(_takes_the_best(s) and s.request.sampling.logprobs is None for s in sequences)

    def take(self, largest: TopK, sequences: list[Sequence]) -> list[int]:
        """The token of each row's largest logit, `largest` `[len(sequences), 1]`. Raises SamplingError as a call
        does.
        """
        values: list[float] = largest.values.flatten().tolist()
        if not all(map(isfinite, values)):
            unsound = {s.request.request_id for s, x in zip(sequences, values, strict=True) if not isfinite(x)}
            raise SamplingError(sorted(unsound))
        tokens: list[int] = largest.indices.flatten().tolist()
        return tokens

    def _pick(self, scores: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """A token for each row of `scores`, which are changed on the way."""
        asked = [sequence.request.sampling for sequence in sequences]
        penalize_repetition(scores, [a.repetition_penalty for a in asked], [s.token_ids for s in sequences])
        bar(scores, [s.stop_token_ids if _is_too_short(s) else () for s in sequences])
        tokens = self._best(scores, sequences)
        rows = [row for row, each in enumerate(asked) if each.temperature > 0]
        if not rows:
            return tokens
        scores = scores if len(rows) == len(asked) else scores[rows]
        for row, token in zip(rows, self._draw(scores, [sequences[row] for row in rows]), strict=True):
            tokens[row] = token
        return tokens

    def _best(self, scores: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """Each row's most likely token. Raises SamplingError where its score is no number."""
        return self.take(self._ops.topk(scores), sequences)

    def _draw(self, scores: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """A token by chance for each row of `scores`, which may be changed on the way."""
        short, indices = shortlist(scores, [s.request.sampling.top_k for s in sequences], self._ops)
        tokens = [0] * len(sequences)
        if short:
            some = scores if len(short) == len(sequences) else scores[short]
            drawn = self._draw_among(some.gather(1, indices), [sequences[row] for row in short])
            for row, token in zip(short, indices.gather(1, drawn[:, None]).flatten().tolist(), strict=True):
                tokens[row] = token
        rest = sorted(set(range(len(sequences))) - set(short))
        if rest:
            scores = scores[rest] if short else scores
            drawn = self._draw_among(scores, [sequences[row] for row in rest])
            for row, token in zip(rest, drawn.tolist(), strict=True):
                tokens[row] = token
        return tokens

    def _draw_among(self, scores: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        """A column by chance for each row of `scores`, which are changed on the way."""
        asked = [sequence.request.sampling for sequence in sequences]
        apply_temperature(scores, [a.temperature for a in asked])
        keep_top_k(scores, [a.top_k for a in asked], self._ops)
        keep_top_p(scores, [a.top_p for a in asked], self._ops)
        keep_min_p(scores, [a.min_p for a in asked])
        numbers = uniforms(
            [a.seed or 0 for a in asked],
            [s.index for s in sequences],
            [s.num_output_tokens for s in sequences],
        )
        return draw(scores, torch.from_numpy(numbers).to(scores.device))

    def _note_logprobs(self, logits: torch.Tensor, tokens: list[int], sequences: list[Sequence]) -> None:
        wanted = [(row, s, s.request.sampling.logprobs) for row, s in enumerate(sequences)]
        asked = [(row, sequence, count) for row, sequence, count in wanted if count is not None]
        if not asked:
            return
        rows = [row for row, _, _ in asked]
        logprobs = (logits[rows] if len(rows) < len(logits) else logits).float().log_softmax(dim=-1)
        picked = torch.tensor([tokens[row] for row in rows], device=logits.device)
        own = logprobs.gather(1, picked[:, None]).flatten().tolist()
        count = min(max(count for _, _, count in asked), logits.shape[1])
        top = self._ops.topk(logprobs, max(1, count))
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
