"""A model that says given tokens, with SmolLM2's vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tokenizers.pre_tokenizers import ByteLevel

from kvlab.config import SchedulerConfig
from kvlab.engine.clock import WallClock
from kvlab.engine.core import EngineCore
from kvlab.engine.sampler import Sampler
from kvlab.engine.scheduler import build_scheduler
from kvlab.engine.step import StepInput, StepResult
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.view import CacheView
from kvlab.models.tokenizer import Tokenizer


class SaidModel:
    """Says one of several scripts, token by token: a call's prompt number n gets script n, and then the end, or
    with `fails` an error.
    """

    def __init__(self, tokenizer: Tokenizer, scripts: Sequence[Sequence[int]], *, fails: bool = False) -> None:
        self.scripts = scripts
        self.vocab_size = tokenizer._backend.get_vocab_size()
        self._fails = fails
        self._end: int = tokenizer._backend.get_vocab()["<|im_end|>"]
        self.engine = EngineCore(
            PagedKVCachePool(num_blocks=256, block_size=16, max_seq_len=128),
            build_scheduler(SchedulerConfig(max_batch_size=128)),
            self,
            WallClock(),
            eos_token_ids=(self._end,),
            vocab_size=self.vocab_size,
            detokenize=tokenizer.decode,
        )

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        """See Executor."""
        batch = step.sampling()
        logits = torch.zeros(len(batch), self.vocab_size)
        for row, position in enumerate(batch.num_outputs.tolist()):
            _, _, number = step.sequences[step.sampled[row]].request_id.partition("-")[2].partition("-")
            script = self.scripts[int(number or 0)]
            if self._fails and position == len(script):
                raise ArithmeticError("the device fell over")
            logits[row, script[position] if position < len(script) else self._end] = 99.0
        return Sampler()(logits, batch)


def splits(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    """The tokens of a text in every way that single characters can be split into tokens of the vocabulary."""
    ids = tokenizer._backend.get_vocab()
    letters = _letters()
    found: list[list[int]] = [[]]
    for character in text:
        written = "".join(letters[byte] for byte in character.encode())
        ways = list(_ways(written, ids))
        found = [before + way for before in found for way in ways]
    return found


def _ways(written: str, ids: dict[str, int]) -> Iterator[list[int]]:
    if not written:
        yield []
    for end in range(1, len(written) + 1):
        if written[:end] in ids:
            for rest in _ways(written[end:], ids):
                yield [ids[written[:end]], *rest]


def _letters() -> dict[int, str]:
    """How byte-level vocabularies write each byte (Radford et al., 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    assert set(found.values()) == set(ByteLevel.alphabet())
    return found
