"""Picks the next token of each sequence from its logits."""

from collections.abc import Sequence
from math import isfinite
from weakref import WeakKeyDictionary

import torch

from kvlab.core import GrammarState, SequenceSpec, TokenLogprobs
from kvlab.engine.logits import (
    add_bias,
    apply_temperature,
    keep_min_p,
    keep_tokens,
    keep_top_k,
    keep_top_p,
    mask_tokens,
    penalize_output,
    penalize_repetition,
    sample,
    top_k_candidates,
)
from kvlab.engine.step import SamplingBatch, StepResult
from kvlab.errors import GrammarError, SamplingError
from kvlab.models.ops.base import LogitsOps, TopK
from kvlab.models.ops.torch_ops import TorchOps
from kvlab.splitmix import uniforms


class Sampler:
    """Greedy or random sampling, the whole batch at once.

    A sampled token depends on the request's seed, the sample's and the token's index and the logits, and on nothing
    else: not on the other sequences, nor on whether the step was run before. Of equal logits the first counts as
    the largest.
    """

    def __init__(self, ops: LogitsOps | None = None) -> None:
        self._ops = ops or TorchOps()
        self._grammars: WeakKeyDictionary[SequenceSpec, GrammarState] = WeakKeyDictionary()

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, batch: SamplingBatch) -> StepResult:
        """A token for each row of `logits` `[len(batch), vocab]`, and log-probabilities where a request asks for
        them. Raises SamplingError for logits that are not finite.
        """
        if not batch:
            return StepResult([])
        tokens = self._top1(logits, batch)
        rows = [row for row in range(len(batch)) if not _takes_top1(batch, row)]
        if rows:
            scores = logits[rows] if len(rows) < len(batch) else logits
            picked = self._pick(scores.to(torch.float32, copy=True), batch.take(rows))
            for row, token in zip(rows, picked, strict=True):
                tokens[row] = token
        return StepResult(tokens, self._logprobs(logits, tokens, batch))

    def is_greedy(self, batch: SamplingBatch) -> bool:
        """Whether the largest logit of each row is enough, so that no others need be stored."""
        return all(
            sequence.is_greedy or (sequence.sampling.logprobs is None and _takes_top1(batch, row))
            for row, sequence in enumerate(batch.sequences)
        )

    def take_top1(self, top1: TopK, batch: SamplingBatch) -> StepResult:
        """The tokens of the largest logits, `top1` `[len(batch), 1]`. Raises SamplingError as a call does."""
        return StepResult(self._finite(top1, batch))

    def _pick(self, scores: torch.Tensor, batch: SamplingBatch) -> list[int]:
        """A token for each row of `scores`, which are changed on the way."""
        asked = [sequence.sampling for sequence in batch.sequences]
        histories = [batch.histories.get(row, ()) for row in range(len(batch))]
        add_bias(scores, [a.logit_bias for a in asked])
        penalize_repetition(scores, [a.repetition_penalty for a in asked], histories)
        outputs = [
            ids[len(ids) - count :] for ids, count in zip(histories, batch.num_outputs.tolist(), strict=True)
        ]
        penalize_output(scores, [a.presence_penalty for a in asked], [a.frequency_penalty for a in asked], outputs)
        self._follow(scores, batch, outputs)
        masked = [s.stop_token_ids if _is_too_short(batch, row) else () for row, s in enumerate(batch.sequences)]
        # Rows of a grammar that other masks may leave none of its tokens.
        twice = [r for r, a in enumerate(asked) if a.grammar and (a.allowed_token_ids or a.bad_words or masked[r])]
        before = scores[twice]
        keep_tokens(scores, [a.allowed_token_ids for a in asked])
        mask_tokens(scores, [_last_of_bad_words(a.bad_words, ids) for a, ids in zip(asked, outputs, strict=True)])
        mask_tokens(scores, masked)
        if twice:
            is_empty = (scores[twice].amax(dim=-1) == float("-inf"))[:, None]
            scores[twice] = torch.where(is_empty, before, scores[twice])
        tokens = self._top1(scores, batch)
        rows = [row for row, sampling in enumerate(asked) if sampling.temperature > 0]
        if not rows:
            return tokens
        scores = scores if len(rows) == len(asked) else scores[rows]
        for row, token in zip(rows, self._sample(scores, batch.take(rows)), strict=True):
            tokens[row] = token
        return tokens

    def _follow(self, scores: torch.Tensor, batch: SamplingBatch, outputs: Sequence[Sequence[int]]) -> None:
        """Mask what rows' grammars do not allow behind their outputs.

        A row whose output does not follow its grammar is behind a proposal that will not be accepted.
        """
        for row, (sequence, output) in enumerate(zip(batch.sequences, outputs, strict=True)):
            if (grammar := sequence.sampling.grammar) is None:
                continue
            try:
                state = self._grammars.get(sequence)
                if state is None:
                    state = self._grammars[sequence] = grammar.start()
                allowed = state.allowed(output)
            except GrammarError as error:
                raise SamplingError([sequence.request_id], str(error)) from error
            if allowed is not None:
                scores[row].masked_fill_(torch.from_numpy(allowed).to(scores.device).logical_not_(), float("-inf"))

    def _top1(self, scores: torch.Tensor, batch: SamplingBatch) -> list[int]:
        """Each row's most likely token. Raises SamplingError where its score is not finite."""
        return self._finite(self._ops.topk(scores), batch)

    @staticmethod
    def _finite(top1: TopK, batch: SamplingBatch) -> list[int]:
        values: list[float] = top1.values.flatten().tolist()
        if not all(map(isfinite, values)):
            rows = zip(batch.sequences, values, strict=True)
            raise SamplingError(sorted({sequence.request_id for sequence, value in rows if not isfinite(value)}))
        tokens: list[int] = top1.indices.flatten().tolist()
        return tokens

    def _sample(self, scores: torch.Tensor, batch: SamplingBatch) -> list[int]:
        """A random token for each row of `scores`, which may be changed on the way."""
        counts = [sequence.sampling.top_k for sequence in batch.sequences]
        short, candidates = top_k_candidates(scores, counts, self._ops)
        tokens = [0] * len(batch)
        if short:
            some = scores if len(short) == len(batch) else scores[short]
            columns = self._sample_columns(some.gather(1, candidates), batch.take(short))
            for row, token in zip(short, candidates.gather(1, columns[:, None]).flatten().tolist(), strict=True):
                tokens[row] = token
        rest = sorted(set(range(len(batch))) - set(short))
        if rest:
            scores = scores[rest] if short else scores
            for row, token in zip(rest, self._sample_columns(scores, batch.take(rest)).tolist(), strict=True):
                tokens[row] = token
        return tokens

    def _sample_columns(self, scores: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """A random column for each row of `scores`, which are changed on the way."""
        asked = [sequence.sampling for sequence in batch.sequences]
        apply_temperature(scores, [a.temperature for a in asked])
        keep_top_k(scores, [a.top_k for a in asked], self._ops)
        keep_top_p(scores, [a.top_p for a in asked], self._ops)
        keep_min_p(scores, [a.min_p for a in asked])
        indices = [sequence.index for sequence in batch.sequences]
        numbers = uniforms([a.seed or 0 for a in asked], indices, batch.num_outputs.tolist())
        return sample(scores, torch.from_numpy(numbers).to(scores.device))

    def _logprobs(
        self, logits: torch.Tensor, tokens: list[int], batch: SamplingBatch
    ) -> list[TokenLogprobs | None] | None:
        counts = [sequence.sampling.logprobs for sequence in batch.sequences]
        asked = [(row, count) for row, count in enumerate(counts) if count is not None]
        if not asked:
            return None
        rows = [row for row, _ in asked]
        some = logits[rows] if len(rows) < len(logits) else logits
        entries = self.logprobs(some, [tokens[row] for row in rows], [count for _, count in asked])
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        for row, entry in zip(rows, entries, strict=True):
            logprobs[row] = entry
        return logprobs

    @torch.inference_mode()
    def logprobs(self, logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
        """Those of a token for each row of `logits` `[len(tokens), vocab]`, and of so many alternatives."""
        logprobs = logits.float().log_softmax(dim=-1)
        own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None]).flatten().tolist()
        top = self._ops.topk(logprobs, max(1, min(max(counts), logits.shape[1])))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [
            TokenLogprobs(value, tuple(zip(ids[:count], values[:count], strict=True)))
            for value, count, (ids, values) in zip(own, counts, pairs, strict=True)
        ]


def _takes_top1(batch: SamplingBatch, row: int) -> bool:
    """Whether a row's token is that of the largest logit, whatever it is."""
    sequence = batch.sequences[row]
    return sequence.sampling.temperature == 0 and not sequence.is_adjusted and not _is_too_short(batch, row)


def _last_of_bad_words(words: Sequence[tuple[int, ...]], output: Sequence[int]) -> list[int]:
    """The tokens that would end one of the words, of which the output ends with all others."""
    return [word[-1] for word in words if tuple(output[max(0, len(output) - len(word) + 1) :]) == word[:-1]]


def _is_too_short(batch: SamplingBatch, row: int) -> bool:
    return bool(batch.num_outputs[row] < batch.sequences[row].sampling.min_tokens)
