"""What does a grammar cost a step, with llguidance and with xgrammar, at 49,152 and 151,936 words?

    python -m experiments.structured_outputs.run [--rounds 5]

The smaller vocabulary is SmolLM2's (`kvlab fetch smollm2`), the larger one is it and words made of two of its own:
as many as Qwen3's. A document that each schema allows is followed token by token; per
token: the mask, and telling what came. xgrammar has an environment of its own in kvlab's cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tokenizers
import torch

from experiments.environments import program
from kvlab.core import SamplingParams, SequenceSpec
from kvlab.engine.sampler import Sampler
from kvlab.engine.step import SamplingBatch
from kvlab.lab.machine import describe
from kvlab.models.grammars import Grammars
from kvlab.models.published import published_file

SIZES = (49_152, 151_936)
END = 2
ENTRY = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["person", "place"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, tuple[dict[str, Any], Any]] = {
    "an object": (ENTRY, {"name": "Marie Curie", "age": 66, "kind": "person"}),
    "a list of objects": (
        {"type": "array", "items": ENTRY},
        [{"name": f"Person number {n}, of several words", "age": n, "kind": "place"} for n in range(12)],
    ),
    "any object": ({"type": "object"}, {"a": [1, 2.5, None, {"b": "some longer text, \n with all there is"}]}),
}
XGRAMMAR = """
import json, sys, time, xgrammar
folder, size, end, texts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.load(open(sys.argv[4]))
words = json.load(open(folder))
info = xgrammar.TokenizerInfo(words, xgrammar.VocabType.BYTE_LEVEL, vocab_size=size, stop_token_ids=[end])
compiler = xgrammar.GrammarCompiler(info)
found = []
for schema, ids in texts:
    begin = time.perf_counter()
    compiled = compiler.compile_json_schema(json.dumps(schema), any_whitespace=True)
    made, times = time.perf_counter() - begin, []
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, size)
    for token in ids:
        begin = time.perf_counter()
        matcher.fill_next_token_bitmask(mask)
        ok = matcher.accept_token(token)
        times.append(time.perf_counter() - begin)
        assert ok, token
    found.append([made, times])
print(json.dumps(found))
"""


def widened(tokenizer: tokenizers.Tokenizer, size: int) -> str:
    """The tokenizer with so many words, as text."""
    found = json.loads(tokenizer.to_str())
    vocab = found["model"]["vocab"]
    own = list(vocab)
    pairs = (first + second for first in own[300:] for second in own[1000:1100])
    while len(vocab) < size:
        vocab.setdefault(next(pairs), len(vocab))
    return json.dumps(found)


def follow(grammars: Grammars, schema: dict[str, Any], ids: list[int]) -> tuple[float, list[float]]:
    """Seconds to compile a schema, and for each token."""
    begin = time.perf_counter()
    state = grammars.json_schema(schema, white_space=r"[ \n\t]*").start()
    made, times = time.perf_counter() - begin, []
    for place in range(len(ids)):
        begin = time.perf_counter()
        allowed = state.allowed(ids[:place])
        times.append(time.perf_counter() - begin)
        assert allowed is not None
        assert allowed[ids[place]], ids[place]
    return made, times


def steps(size: int, batch: int, rounds: int, grammars: Grammars | None) -> float:
    """Milliseconds to sample a batch, each row of which follows a grammar, or none."""
    logits = torch.randn(batch, size, generator=torch.Generator().manual_seed(0))
    grammar = None if grammars is None else grammars.json_schema(ENTRY)
    specs = tuple(SequenceSpec(str(n), 0, SamplingParams(9, grammar=grammar)) for n in range(batch))
    rows = SamplingBatch(specs, np.zeros(batch, dtype=np.int64), dict.fromkeys(range(batch), (1, 2, 3)))
    sampler, times = Sampler(), []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        sampler(logits, rows)
        times.append(time.perf_counter() - begin)
    return median(times[2:]) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    folder = published_file("smollm2").parent / "tokenizer"
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    print(f"{describe('cpu')}, {time.strftime('%Y-%m-%d')}\n")
    print("| words | schema | tokens | library | compiled, ms | a token, us: median | 99 % |")
    print("|---|---|---|---|---|---|---|")
    sampled = list[str]()
    for size in SIZES:
        text = widened(tokenizer, size)
        texts = [(schema, tokenizer.encode(json.dumps(value)).ids) for schema, value in SCHEMAS.values()]
        runs: dict[str, list[list[tuple[float, list[float]]]]] = {"llguidance": [], "xgrammar": []}
        for _ in range(rounds):  # in turns
            grammars = Grammars(lambda text=text: text, size, [END])  # type: ignore[misc]
            grammars.choice(["a"])  # which reads the tokenizer
            runs["llguidance"].append([follow(grammars, *each) for each in texts])
            runs["xgrammar"].append(xgrammar(text, size, texts))
        for number, (name, (_, ids)) in enumerate(zip(SCHEMAS, texts, strict=True)):
            for library, found in runs.items():
                made = median(each[number][0] for each in found) * 1000
                times = sorted(seconds for each in found for seconds in each[number][1])
                last = times[int(len(times) * 0.99)] * 1e6
                cells = (
                    f"{size:,}",
                    name,
                    len(ids),
                    library,
                    f"{made:.1f}",
                    f"{median(times) * 1e6:.0f}",
                    f"{last:.0f}",
                )
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
        without, held = steps(size, 8, 50, None), steps(size, 8, 50, grammars)
        sampled.append(
            f"{size:,} words: 8 rows are sampled in {without:.2f} ms, with a grammar each in {held:.2f} ms"
        )
    print("\n" + "\n".join(sampled))


def xgrammar(text: str, size: int, texts: list[Any]) -> list[tuple[float, list[float]]]:
    """The same with xgrammar, in a process of its environment."""
    vocab = json.loads(text)["model"]["vocab"]
    python = program("xgrammar==0.2.8", torch=True).parent / "python"
    with tempfile.TemporaryDirectory() as folder:
        words, asked = Path(folder, "words.json"), Path(folder, "asked.json")
        words.write_text(json.dumps(sorted(vocab, key=vocab.__getitem__)))
        asked.write_text(json.dumps(texts))
        command: list[str | Path] = [python, "-c", XGRAMMAR, words, str(size), str(END), asked]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"xgrammar failed: {done.stderr[-500:]}")
    return [(made, times) for made, times in json.loads(done.stdout)]


if __name__ == "__main__":
    main()
