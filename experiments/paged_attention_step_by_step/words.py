"""Two prompts in words, answered by each version of paged attention: the text, blocks, time and padding of each.

    kvlab fetch smollm2
    python -m experiments.paged_attention_step_by_step.words [--model smollm2_135m] [--tokens 24]

If a version answers otherwise than the first, the exit code is 1. Times are CPU times of the process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from experiments.paged_attention_step_by_step.run import VERSIONS, Answer, Version, engine_of
from experiments.runs import configure
from kvlab.core import Message, Request, SamplingParams
from kvlab.lab.machine import processor
from kvlab.models.tokenizer import load_tokenizer

QUESTIONS = (
    "What is the capital of France?",
    "A train leaves at nine in the morning and arrives at noon. It stops twice, for ten minutes each time. "
    "How long does the journey take? Answer in one sentence.",
)
SLOTS = Version(
    "slots",
    "no pages: a slot of 1,024 tokens each",
    "",
    ("kv=contiguous", "attention=concat", "scheduler.max_batch_size=2"),
)


@dataclass(frozen=True)
class Spoken:
    """What a version answered in words, and what it took."""

    texts: tuple[str, ...]
    answer: Answer
    seconds: float

    @property
    def padding(self) -> int:
        """Token slots of the blocks in use that hold no token."""
        pool = self.answer.fullest
        return 0 if pool is None else pool.blocks_in_use * pool.block_size - pool.tokens_stored


def speak(*model: str, tokens: int, versions: Sequence[Version] = (SLOTS, *VERSIONS)) -> dict[Version, Spoken]:
    """What each version answers to the questions, at most `tokens` tokens each. `model` are settings."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(configure([*model]).model)
    requests = [
        Request(f"q{number}", tuple(tokenizer.encode_prompt([Message("user", text)])), SamplingParams(tokens))
        for number, text in enumerate(QUESTIONS)
    ]
    spoken = {}
    for version in versions:
        serve = engine_of(version, *model)
        serve([Request("warm-up", (1, 2, 3), SamplingParams(2))])
        start = time.process_time()
        answer = serve(requests)
        seconds = time.process_time() - start
        spoken[version] = Spoken(tuple(map(tokenizer.decode, answer.tokens)), answer, seconds)
    return spoken


def table(spoken: dict[Version, Spoken]) -> str:
    """The versions as Markdown."""
    columns = (
        "version",
        "forward passes",
        "blocks at most",
        "token slots in them without a token",
        "CPU s",
        "words",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    first = next(iter(spoken.values())).texts
    for version, said in spoken.items():
        blocks = 0 if said.answer.fullest is None else said.answer.fullest.blocks_in_use
        same = "the same" if said.texts == first else "**differ**"
        cells = (version.name, said.answer.passes, blocks, f"{said.padding:,}", f"{said.seconds:.2f}", same)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_135m", help="a file of conf/model that has a tokenizer")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer, at most")
    options = parser.parse_args()

    spoken = speak(f"model={options.model}", tokens=options.tokens)
    first = next(iter(spoken.values()))
    print(f"{options.model}, float32, one thread of {processor()}\n")
    for question, text in zip(QUESTIONS, first.texts, strict=True):
        print(f"> {question}\n{text}\n")
    print(table(spoken))
    if wrong := [version.name for version, said in spoken.items() if said.texts != first.texts]:
        sys.exit(f"other words than {next(iter(spoken)).name}'s: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
