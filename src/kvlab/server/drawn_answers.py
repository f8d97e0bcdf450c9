"""What a simulated server answers: words of its tokenizer, as many as `server.output_len` says."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from kvlab.config import LengthConfig
from kvlab.core import SequenceSpec
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.kv.view import CacheView
from kvlab.models.tokenizer import Tokenizer
from kvlab.splitmix import STEP, mix
from kvlab.workloads.lengths import draw_length

_KNOWN = 2**16  # sequences whose lengths are remembered
_LINE_ENDS = ("", "\n")  # the end of a special token's text, and of a chat template's header


class DrawnAnswers(Executor):
    """Another executor, whose tokens are drawn anew: from the request's seed, the length of its prompt, the
    sample's number and the token's position, so that a request with a seed has one answer.

    An answer has as many tokens as drawn from `lengths`, the last of them the first of `ends`, unless its request
    ignores ends or has fewer `max_tokens`. The others are words, so that the answer's text is encoded to the tokens
    that it was made of, and the next turn of a conversation finds them in the prefix cache. Without a `tokenizer`,
    or where it has no words, they are any tokens of `vocab_size`.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        lengths: LengthConfig,
        ends: Sequence[int],
        vocab_size: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._executor, self._lengths, self._end, self._tokenizer = executor, lengths, ends[0], tokenizer
        starts, words = ([], []) if tokenizer is None else tokenizer.words(vocab_size)
        anything = np.setdiff1d(np.arange(vocab_size), ends)
        self._words = np.setdiff1d(words, ends) if words else anything
        self._starts = np.setdiff1d(starts, ends) if starts else self._words
        self._length = lru_cache(_KNOWN)(self._drawn_length)

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        result = self._executor.execute(step, view)
        rows = step.sampled
        specs, outputs = [step.sequences[row] for row in rows.tolist()], step.num_outputs[rows]
        prompts = np.asarray(view.lengths)[rows] - outputs
        drawn = [
            _mixed(spec.sampling.seed, spec.index, prompt)
            for spec, prompt in zip(specs, prompts.tolist(), strict=True)
        ]
        seeds = np.array(drawn, dtype=np.uint64)
        numbers = mix(seeds + outputs.astype(np.uint64) * STEP)
        tokens: list[int] = self._words[numbers % np.uint64(len(self._words))].tolist()
        lasts = step.token_ids[step.num_tokens.cumsum()[rows] - 1]
        for place, (spec, count) in enumerate(zip(specs, outputs.tolist(), strict=True)):
            if self._ends_at(spec, count, drawn[place]):
                tokens[place] = self._end
            elif not count and self._begins_line(int(lasts[place])):
                tokens[place] = int(self._starts[numbers[place] % np.uint64(len(self._starts))])
        return replace(result, token_ids=tokens)

    def _ends_at(self, spec: SequenceSpec, count: int, seed: int) -> bool:
        """Whether the token behind so many is a sequence's last."""
        asked = spec.sampling
        return not asked.ignore_eos and count >= asked.min_tokens and count + 1 >= self._length(seed)

    def _drawn_length(self, seed: int) -> int:
        return draw_length(np.random.default_rng(seed), self._lengths)

    def _begins_line(self, last: int) -> bool:
        """Whether what follows a prompt's last token stands alone, so that a word there has no space."""
        return self._tokenizer is not None and self._tokenizer.decode([last])[-1:] in _LINE_ENDS


@lru_cache(_KNOWN)
def _mixed(*numbers: int | None) -> int:
    """64 bits for these numbers."""
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=8).digest())
