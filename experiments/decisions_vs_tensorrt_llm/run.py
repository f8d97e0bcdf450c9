"""kvlab's decisions beside those of TensorRT-LLM's own Python scheduler, step by step.

    python -m experiments.decisions_vs_tensorrt_llm.run --checkout TensorRT-LLM [--json FILE]

Both get the same requests, the same memory and limits, blocks of 32 tokens, and steps of one second each. Neither
computes a model; TensorRT-LLM is given the tokens that kvlab drew. Every step is compared: who is admitted, resumed
and paused, how many tokens of whom, prompt tokens found in the cache, evicted blocks, blocks in use. Prints a
table, a row for each workload, and the first step of each that differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from experiments import decisions
from experiments.decisions import (
    AHEAD,
    ARRIVALS,
    BURST,
    CONVERSATIONS,
    LONG,
    SHARED,
    UNSHARED,
    Rows,
    decide,
    report,
)
from experiments.decisions_vs_tensorrt_llm.tensorrt_llm_scheduler import run as decided_by
from experiments.decisions_vs_tensorrt_llm.tensorrt_llm_scheduler import scheduler_of
from experiments.runs import configure

BLOCK = 32
BASE = [
    "executor=simulated",
    "hardware=h100_sxm",
    "framework=trtllm",
    "model=qwen3_8b",
    "model.max_seq_len=16384",
    f"kv.block_size={BLOCK}",
    "scheduler.ahead=false",
    "scheduler.max_batched_tokens=512",  # max_num_tokens
    "scheduler.max_batch_size=32",
]
WHOLE = "scheduler.chunk_unit=16384"  # enable_chunked_prefill=false
FULL_BLOCKS = "kv.partial_reuse=false"  # enable_partial_reuse=false
EVICT = "scheduler.reserve_output=false"  # MAX_UTILIZATION


class Workload(NamedTuple):
    """A workload, the blocks for which there is memory, and the most that its requests ask for, if these are more
    than they produce; and what only TensorRT-LLM is told.
    """

    overrides: list[str]
    blocks: int
    max_tokens: int | None = None
    others: dict[str, Any] | None = None


def of(*overrides: str, blocks: int, max_tokens: int | None = None, **others: Any) -> Workload:
    """A workload with memory for so many blocks."""
    return Workload(list(overrides), blocks, max_tokens, others)


CHUNKS = [LONG, "workload.rate=0.3"]
WORKLOADS = {
    "burst, memory for all": of(*BURST, blocks=1000),
    "burst, prompts in chunks": of(*BURST, LONG, blocks=3000),
    "arrivals, memory for all": of(*ARRIVALS, blocks=1000),
    "arrivals, prompts in chunks": of(*ARRIVALS, *CHUNKS, blocks=3000),
    "eight at once": of(*BURST, "workload.num_requests=100", "scheduler.max_batch_size=8", blocks=1000),
    "shared prefixes, memory for all": of(*SHARED, blocks=4000),
    "shared prefixes, a burst": of(*SHARED, "workload.arrival=burst", blocks=4000),
    "conversations, memory for all": of(*CONVERSATIONS, blocks=2000),
    "burst, little memory": of(*BURST, blocks=75),
    "arrivals, little memory": of(*ARRIVALS, blocks=60),
    "arrivals, no prefix cache": of(*ARRIVALS, UNSHARED, blocks=60),
    "arrivals, chunks, little memory": of(*ARRIVALS, *CHUNKS, blocks=150),
    "shared prefixes, little memory": of(*SHARED, blocks=150),
    "conversations, little memory": of(*CONVERSATIONS, blocks=150),
    "prompts whole, arrivals": of(*ARRIVALS, WHOLE, blocks=1000, chunked=False),
    "prompts whole, burst, little memory": of(*BURST, WHOLE, blocks=75, chunked=False),
    "prompts whole, shared prefixes": of(*SHARED, "workload.arrival=burst", WHOLE, blocks=4000, chunked=False),
    "asked for 512, memory for all": of(*ARRIVALS, blocks=3000, max_tokens=512),
    "asked for 512, little memory": of(*ARRIVALS, blocks=100, max_tokens=512),
    "asked for 512, no prefix cache": of(*ARRIVALS, UNSHARED, blocks=100, max_tokens=512),
    "overlap: burst, memory for all": of(*BURST, AHEAD, blocks=1000),
    "overlap: arrivals, prompts in chunks": of(*ARRIVALS, *CHUNKS, AHEAD, blocks=3000),
    "overlap: shared prefixes, memory for all": of(*SHARED, AHEAD, blocks=4000),
    "overlap: shared prefixes, a burst": of(*SHARED, "workload.arrival=burst", AHEAD, blocks=4000),
    "overlap: arrivals, little memory": of(*ARRIVALS, AHEAD, blocks=60),
    "overlap: asked for 512, little memory": of(*ARRIVALS, AHEAD, blocks=100, max_tokens=512),
    "MAX_UTILIZATION: burst, memory for all": of(*BURST, EVICT, blocks=1000),
    "MAX_UTILIZATION: burst, little memory": of(*BURST, EVICT, blocks=75),
    "MAX_UTILIZATION: arrivals, little memory": of(*ARRIVALS, EVICT, blocks=60),
    "MAX_UTILIZATION: no prefix cache": of(*ARRIVALS, EVICT, UNSHARED, blocks=60),
    "MAX_UTILIZATION: chunks, little memory": of(*ARRIVALS, *CHUNKS, EVICT, blocks=150),
    "whole blocks: shared prefixes": of(*SHARED, FULL_BLOCKS, blocks=4000),
    "whole blocks: conversations": of(*CONVERSATIONS, FULL_BLOCKS, blocks=2000),
    "whole blocks: arrivals, little memory": of(*ARRIVALS, FULL_BLOCKS, blocks=60),
    "EQUAL_PROGRESS: burst, prompts in chunks": of(*BURST, LONG, blocks=3000, chunking="EQUAL_PROGRESS"),
}


def ours(workload: Workload) -> tuple[dict[str, Any], Rows]:
    """The trace for TensorRT-LLM, and what kvlab decided in each step."""
    config = configure([*BASE, *workload.overrides, f"kv.num_blocks={workload.blocks}"])
    decided = decide(config, workload.max_tokens)
    trace = {
        "block_size": BLOCK,
        "num_blocks": workload.blocks,
        "max_batch_size": config.scheduler.max_batch_size,
        "max_num_tokens": config.scheduler.max_batched_tokens,
        "max_seq_len": config.model.max_seq_len,
        "policy": "GUARANTEED_NO_EVICT" if config.scheduler.reserves_output else "MAX_UTILIZATION",
        "chunked": True,
        "chunking": "FIRST_COME_FIRST_SERVED",
        "reuse": config.kv.prefix_sharing,
        "partial_reuse": config.kv.partial_reuse,
        "overlap": config.scheduler.ahead,
        "requests": decided.requests,
    }
    return trace | (workload.others or {}), decided.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="folder of TensorRT-LLM's repository")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=0, help="how many steps around the first difference to print")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    module = scheduler_of(arguments.checkout)
    rows = {}
    for name in arguments.workloads:
        trace, mine = ours(WORKLOADS[name])
        rows[name] = mine, decided_by(trace, module)
    report(rows, "TensorRT-LLM", decisions.FIELDS, steps=arguments.steps, json_path=arguments.json)


if __name__ == "__main__":
    main()
