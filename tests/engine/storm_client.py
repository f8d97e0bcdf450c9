"""One client of a storm: submits, reads, leaves, and says what it got."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

from kvlab.core import FinishReason, Request, RequestRecord, StepOutput
from tests.support.table import VOCAB, undisturbed

if TYPE_CHECKING:
    from tests.engine.storm import Storm


def poisoned(token: int) -> bool:
    """Whether the detokenizer fails on it."""
    return token % 300 == 7


def text_of(token_ids: Sequence[int]) -> str:
    """A letter for each token."""
    if any(map(poisoned, token_ids)):
        raise UnicodeError("a token of no text")
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


@dataclass(frozen=True)
class Outcome:
    """What one sample should be told, if nobody disturbs it."""

    tokens: tuple[int, ...]
    text: str
    reason: FinishReason


@lru_cache(maxsize=4096)
def alone(request: Request, sample: int) -> Outcome:
    """What a sample gets that has the engine to itself."""
    tokens, text = undisturbed(request, sample), ""
    for count, token in enumerate(tokens, start=1):
        if poisoned(token) or (count == 1 and any(map(poisoned, request.prompt_token_ids[-5:]))):
            return Outcome(tuple(tokens[:count]), text, FinishReason.FAILED)
        text += text_of([token])
        found = [text.find(stop) for stop in request.sampling.stop if stop in text]
        if found:
            return Outcome(tuple(tokens[:count]), text[: min(found)], FinishReason.STOP)
    return Outcome(tuple(tokens), text, FinishReason.LENGTH)


@dataclass
class Told:
    """What one sample was told."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: FinishReason | None = None
    error: str | None = None


class Client:
    """One request: what it was told, and what its owner did to it."""

    def __init__(self, storm: Storm, request: Request, draws: random.Random) -> None:
        self.storm, self.request, self.draws = storm, request, draws
        self.samples = {index: Told() for index in range(request.sampling.n)}
        self.leaves_after = draws.randint(1, 12) if draws.random() < 0.2 else None  # outputs
        self.raises_at = draws.randint(1, 6) if draws.random() < 0.1 else None  # tokens of a sample
        self.left = False
        self.outputs = 0
        self.records: Counter[int] = Counter()
        self.ended = threading.Event()  # of a submitted request: every sample has its record

    def read(self, output: StepOutput) -> None:
        told = self.samples[output.index]
        self.outputs += 1
        if output.request_id != self.request.request_id:
            self.storm.wrong(f"{self.request.request_id} was told of {output.request_id}")
        if told.reason is not None:
            self.storm.wrong(f"{self.request.request_id} was told after its end: {output}")
        if output.token_id is not None:
            told.tokens.append(output.token_id)
        told.text += output.text
        told.reason, told.error = output.finish_reason, output.error

    def callback(self, output: StepOutput) -> None:
        self.read(output)
        if len(self.samples[output.index].tokens) == self.raises_at:
            raise ValueError("the callback fails")

    def finish(self, record: RequestRecord) -> None:
        self.records[record.sample] += 1
        told = self.samples[record.sample]
        if (told.reason, told.tokens) != (record.finish_reason, list(record.output_token_ids)):
            self.storm.wrong(f"{record.request_id}: its record says {record}, it was told {told}")
        if len(self.records) == len(self.samples):
            self.ended.set()

    @property
    def leaves(self) -> bool:
        """Whether its owner leaves now."""
        self.left = self.leaves_after is not None and self.outputs >= self.leaves_after
        return self.left

    def check(self) -> None:
        """Compare what it was told with what it should have been."""
        for index, told in self.samples.items():
            self.storm.counts[told.reason.value if told.reason else "left"] += 1
            if problem := self.problem(told, alone(self.request, index)):
                self.storm.wrong(f"{self.request.request_id}, sample {index}: {problem}: {told}")

    def problem(self, told: Told, expected: Outcome) -> str | None:
        tokens, count = tuple(told.tokens), len(told.tokens)
        if self.storm.config.fault == "vocabulary" and tokens[-1:] == (VOCAB + 1,):
            tokens, count = tokens[:-1], count - 1
            if tokens == expected.tokens[:count] and told.reason in (FinishReason.FAILED, FinishReason.LENGTH):
                return None
        if tokens != expected.tokens[:count]:
            return f"other tokens than {expected.tokens}"
        if not text_of(list(takewhile(lambda token: not poisoned(token), told.tokens))).startswith(told.text):
            return "text of other tokens"
        if told.reason is None:
            return None if self.left else "it was never told its end"
        if told.reason is FinishReason.ABORTED:
            aborted = self.left or self.request.request_id in self.storm.aborted
            return None if aborted else "nobody aborted it"
        if told.reason is FinishReason.FAILED:
            return self.failed_without_cause(told, expected)
        if (tokens, told.text, told.reason) != (expected.tokens, expected.text, expected.reason):
            return f"it should have been {expected}"
        return None

    def failed_without_cause(self, told: Told, expected: Outcome) -> str | None:
        error = told.error or ""
        if "detokenizer" in error:
            sound = expected.reason is FinishReason.FAILED and len(told.tokens) == len(expected.tokens)
        elif "callback" in error:
            sound = len(told.tokens) == self.raises_at
        else:
            sound = self.storm.config.fault not in ("none", "slow")
        return None if sound and error else "it failed for no reason"
