"""The recordings as run.py reads them, from a checkout of casys-kaist/LLMServingSim.

    python -m experiments.simulated_vs_recorded.convert CHECKOUT FOLDER

Arrivals are those of the workload, and all times are on the clock on which its first request was queued when it
came. Whole blocks of a prompt that begin alike have one id.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.simulated_vs_recorded.run import BLOCK, RECORDINGS


def rows(served: list[dict[str, Any]], sent: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each request."""
    served = sorted(served, key=lambda row: int(row["request_id"].removeprefix("bench-")))
    shift_s = 1e-9 * sent[0]["arrival_time_ns"] - served[0]["queued_ts"]
    ids: dict[tuple[int, ...], int] = {}
    for was, asked in zip(served, sent, strict=True):
        tokens, before, blocks = asked["input_tok_ids"], -1, []
        for start in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
            before = ids.setdefault((before, *tokens[start : start + BLOCK]), len(ids))
            blocks.append(before)
        times = {
            name: was[f"{name[:-2]}_ts"] + shift_s for name in ("scheduled_s", "first_token_s", "last_token_s")
        }
        yield {
            "arrival_s": 1e-9 * asked["arrival_time_ns"],
            "prompt_tokens": was["input_toks"],
            "output_tokens": was["output_toks"],
            "block_ids": blocks,
            **{name: round(time_s, 6) for name, time_s in times.items()},
        }


def main() -> None:
    checkout, folder = map(Path, sys.argv[1:] or sys.exit(__doc__))

    def read(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    for recording in RECORDINGS:
        found = checkout / "bench/examples" / recording.source / "vllm"
        workload = json.loads((found / "meta.json").read_text())["dataset_path"]
        every = rows(read(found / "requests.jsonl"), read(checkout / workload))
        (folder / recording.file).write_text("".join(f"{json.dumps(row)}\n" for row in every))


if __name__ == "__main__":
    main()
