"""Recordings of vLLM on GPUs, request by request, simulated with nothing fitted to them.

    python -m experiments.simulated_vs_recorded.run FOLDER [SETTING ...]

FOLDER holds a file of JSON lines for each recording (convert.py makes them): arrival_s, prompt_tokens,
output_tokens, block_ids (of whole blocks of 16 tokens of the prompt) and scheduled_s, first_token_s, last_token_s
on one clock. A recording without a file is left out. Settings go to all.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from experiments.runs import configure
from kvlab.engine.build import build_engine
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import plan_run

BLOCK = 16
TERMS = ("queue", "ttft", "tpot", "whole")


@dataclass(frozen=True)
class Recording:
    """A file, where LLMServingSim has it, what was served by what, and vLLM's KV blocks, if they are told."""

    file: str
    source: str
    name: str
    settings: str
    blocks: int | None = None


ALL = "executor=simulated tracking=off workload=timed_trace framework.version=0.19.0"
ALL += " scheduler.max_batched_tokens=2048"
RTX_4090 = "model=llama3_1_8b hardware=rtx_4090 model.max_seq_len=32768 scheduler.max_batch_size=256"
PRO = "hardware=rtx_pro_6000_server scheduler.max_batch_size=128"
GROUPS = "executor.attention_data_parallel=2 executor.expert_parallel=2"  # each with its limits of a step:
GROUPS += " hardware=rtx_pro_6000_server scheduler.max_batch_size=256 scheduler.max_batched_tokens=4096"
RECORDINGS = (
    Recording(
        "vllm019_rtxpro6000_llama8b.jsonl",
        "RTXPRO6000/Llama-3.1-8B",
        "RTX PRO 6000, Llama 3.1 8B",
        f"model=llama3_1_8b {PRO}",
    ),
    Recording("vllm019_rtx4090_llama8b.jsonl", "RTX4090/Llama-3.1-8B", "RTX 4090, Llama 3.1 8B", RTX_4090, 2588),
    Recording(
        "vllm019_rtxpro6000x2_qwen3_32b.jsonl",
        "RTXPRO6000/Qwen3-32B",
        "2 x RTX PRO 6000, Qwen3 32B",
        f"model=qwen3_32b executor.tensor_parallel=2 {PRO}",
    ),
    Recording(
        "vllm019_rtxpro6000x2_qwen3_30b_a3b.jsonl",
        "RTXPRO6000/Qwen3-30B-A3B-Instruct-2507",
        "2 x RTX PRO 6000, Qwen3 30B-A3B, a group each",
        f"model=qwen3_30b_a3b {GROUPS}",
    ),
)


class Times(NamedTuple):
    """Of a request, in ms: until it was taken up, until the first token, per later token, until the last."""

    queue: float
    ttft: float
    tpot: float
    whole: float


def measured(rows: list[dict[str, Any]]) -> Iterator[Times]:
    for row in rows:
        queue, first, last = (
            1000 * (row[key] - row["arrival_s"]) for key in ("scheduled_s", "first_token_s", "last_token_s")
        )
        yield Times(queue, first, (last - first) / max(row["output_tokens"] - 1, 1), last)


def timed_trace(rows: list[dict[str, Any]]) -> Iterator[str]:
    """As vLLM's timed traces have it: an id for the part of a block at a prompt's end, too."""
    fresh = 1 + max((number for row in rows for number in row["block_ids"]), default=0)
    for row in rows:
        ids = list(row["block_ids"])
        while len(ids) * BLOCK < row["prompt_tokens"]:
            ids.append(fresh)
            fresh += 1
        yield json.dumps(
            {
                "timestamp": row["arrival_s"],
                "input_length": row["prompt_tokens"],
                "output_length": row["output_tokens"],
                "hash_ids": ids,
            }
        )


class Simulated(NamedTuple):
    """What the engine said of it, its blocks, and each request."""

    timing: str
    blocks: int
    times: list[Times]


def simulate(rows: list[dict[str, Any]], settings: list[str]) -> Simulated:
    """Requests in the order of the rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_text("\n".join(timed_trace(rows)) + "\n")
        plan = plan_run(configure([*settings, f"workload.path={path}"]))
        records = drive(build_engine(plan), plan.requests).records
    by_id = {record.request_id: record for record in records}
    times = []
    for request in plan.requests:
        record = by_id[request.request_id]
        queue, first, whole = record.queue_ms, record.ttft_ms, record.e2el_ms
        if queue is None or first is None or whole is None:
            raise RuntimeError(f"{record.name} was not served")
        times.append(Times(queue, first, record.tpot_ms or 0.0, whole))
    return Simulated(getattr(plan.timing, "description", "-"), plan.pool.num_blocks, times)


def error(were: list[Times], came: list[Times], term: str) -> tuple[float, float]:
    """Of the mean, and of each request as a mean of absolute errors; of queues in shares of the mean whole time."""
    pairs = [(getattr(one, term), getattr(other, term)) for one, other in zip(were, came, strict=True)]
    mean = fmean(were_ms for were_ms, _ in pairs)
    apart = fmean(came_ms for _, came_ms in pairs) - mean
    if term == "queue":  # many did not wait
        whole = fmean(times.whole for times in were)
        return apart / whole, fmean(abs(came_ms - were_ms) for were_ms, came_ms in pairs) / whole
    return apart / mean, fmean(abs(came_ms / were_ms - 1) for were_ms, came_ms in pairs if were_ms)


def main() -> None:
    folder, *others = sys.argv[1:] or sys.exit(__doc__)
    names = " | ".join(f"{term} | each" for term in TERMS)
    print(f"| recording | timing | blocks | {names} |\n|---|---|---|{'---|' * 2 * len(TERMS)}")
    for recording in RECORDINGS:
        if not (path := Path(folder) / recording.file).exists():
            print(f"{path} is not there: {recording.name} left out", file=sys.stderr)
            continue
        lines = path.read_text().splitlines()
        rows = sorted(map(json.loads, lines), key=lambda row: row["arrival_s"])
        were = list(measured(rows))
        simulated = simulate(rows, [*f"{ALL} {recording.settings}".split(), *others])
        cells = [
            f"{100 * mean:+.1f} % | {100 * each:.1f} %"
            for mean, each in (error(were, simulated.times, term) for term in TERMS)
        ]
        told = f" ({recording.blocks:,})" if recording.blocks else ""
        print(f"| {recording.name} | {simulated.timing} | {simulated.blocks:,}{told} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
