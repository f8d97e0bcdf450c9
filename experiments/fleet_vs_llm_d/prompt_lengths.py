"""How many tokens a server makes of a prompt that inference-perf drew as random ids and sent as text.

    python -m experiments.fleet_vs_llm_d.prompt_lengths TOKENIZER [--groups 150]

TOKENIZER is a directory with Qwen3's tokenizer. Ids drawn evenly from the vocabulary do not come back: bytes that
are no UTF-8 become a replacement character, and what two neighbours spell is split otherwise.
"""

from __future__ import annotations

import argparse
from itertools import takewhile

import numpy as np
from transformers import AutoTokenizer

SHARED, OWN = 6000, 1200  # random ids of a group's prefix, and of a user's question


def main() -> None:
    """Print what prompts and their shared prefixes come to, in tokens and characters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer")
    parser.add_argument("--groups", type=int, default=150)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer, trust_remote_code=False)
    random = np.random.default_rng(0)
    found: dict[str, list[int]] = {"prompt": [], "shared by a group": [], "characters of a prompt": []}
    for _ in range(options.groups):
        prefix, own, other = (
            tokenizer.decode(random.integers(0, tokenizer.vocab_size, size), skip_special_tokens=True)
            for size in (SHARED, OWN, OWN)
        )
        text = f"{prefix} {own}"
        ids, others = (tokenizer(whole).input_ids for whole in (text, f"{prefix} {other}"))
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False))
        for name, value in zip(found, (len(ids), sum(1 for _ in alike), len(text)), strict=True):
            found[name].append(value)
    for name, values in found.items():
        print(f"{name}: {np.mean(values):,.0f} in the mean, {min(values):,} to {max(values):,}")


if __name__ == "__main__":
    main()
