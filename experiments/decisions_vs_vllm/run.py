"""kvlab's decisions beside those of vLLM's own scheduler and KV cache manager, step by step.

    python -m experiments.decisions_vs_vllm.run --vllm-python ENVIRONMENT/bin/python [--json FILE]

Both get the same requests, the same number of blocks and limits of a step, and steps of one second each. Neither
computes a model; vLLM is given the tokens that kvlab drew. Every step is compared: who was admitted, resumed and
preempted, how many tokens of whom were scheduled, prompt tokens found in the prefix cache, evicted blocks, blocks
in use. Prints a table: a row for each workload.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from experiments import decisions
from experiments.decisions import AHEAD, BURST, LONG, UNSHARED, Rows, compare, decide, decided_by, table
from experiments.runs import configure

BASE = [
    "executor=simulated",
    "hardware=h100_sxm",
    "model=qwen3_tiny",
    "model.max_seq_len=4096",
    "scheduler.ahead=false",
    "scheduler.max_batched_tokens=512",
    "scheduler.max_batch_size=32",
]
ARRIVALS = [*decisions.ARRIVALS, "kv.num_blocks=120"]
SHARED = [*decisions.SHARED, "kv.num_blocks=400"]
CONVERSATIONS = [*decisions.CONVERSATIONS, "kv.num_blocks=500"]
CHUNKS = ["scheduler.reserve_prompt=false", "scheduler.max_batched_tokens=128"]
MANY_CHUNKS = [LONG, "scheduler.max_batched_tokens=64"]
WINDOWS = "model=gemma3_tiny"
STATES = ["model=checkpoint", f"model.path={Path(__file__).with_name('hybrid')}"]
CUT = "hardware=l40s"  # where no kernel writes a state in the middle of a step
PRIORITIES = ["workload.priorities=4", "scheduler.order=priority"]
WORKLOADS = {
    "burst, memory for all": [*BURST, "kv.num_blocks=2000"],
    "burst, little memory": [*BURST, "kv.num_blocks=150"],
    "arrivals, little memory": ARRIVALS,
    "arrivals, no prefix cache": [*ARRIVALS, UNSHARED],
    "shared prefixes": SHARED,
    "conversations": CONVERSATIONS,
    "first chunks, arrivals": [*ARRIVALS, *CHUNKS, "workload.rate=0.3"],
    "first chunks, no prefix cache": [*ARRIVALS, *CHUNKS, "workload.rate=0.3", UNSHARED],
    "first chunks, shared prefixes": [*SHARED, *CHUNKS],
    "ahead: burst, memory for all": [*BURST, "kv.num_blocks=2000", AHEAD],
    "ahead: burst, little memory": [*BURST, "kv.num_blocks=150", AHEAD],
    "ahead: arrivals, little memory": [*ARRIVALS, AHEAD],
    "ahead: shared prefixes": [*SHARED, AHEAD],
    "asked for 512": ARRIVALS,
    "ahead: asked for 512": [*ARRIVALS, AHEAD],
    "four priorities, eight at once": [
        *BURST, "kv.num_blocks=2000", "scheduler.max_batch_size=8", "workload.num_requests=100", *PRIORITIES,
    ],
    "four priorities, little memory": [*ARRIVALS, *PRIORITIES],
    "windows, little memory": [WINDOWS, *ARRIVALS],
    "windows, shared prefixes": [WINDOWS, *SHARED],
    "windows, conversations": [WINDOWS, *CONVERSATIONS],
    "windows, prompts of many chunks": [
        WINDOWS, *ARRIVALS, *MANY_CHUNKS, "workload.rate=0.05", "kv.num_blocks=60",
    ],
    "ahead: windows, little memory": [WINDOWS, *ARRIVALS, AHEAD],
    "states, little memory": [*STATES, *ARRIVALS],
    "states, no prefix cache": [*STATES, *ARRIVALS, UNSHARED],
    "states cut from prompts, little memory": [*STATES, *ARRIVALS, CUT],
    "states cut from prompts, shared prefixes": [*STATES, *SHARED, CUT],
    "states cut from prompts, many chunks": [
        *STATES, *ARRIVALS, *MANY_CHUNKS, CUT, "workload.rate=0.05", "kv.num_blocks=130",
    ],
    "states, shared prefixes": [*STATES, *SHARED],
    "states, conversations": [*STATES, *CONVERSATIONS],
    "states, prompts of many chunks": [*STATES, *ARRIVALS, *MANY_CHUNKS, "workload.rate=0.05", "kv.num_blocks=130"],
    "ahead: states, little memory": [*STATES, *ARRIVALS, AHEAD],
    "ahead: states, shared prefixes": [*STATES, *SHARED, AHEAD],
}  # fmt: skip


ASKED = {"asked for 512": 512, "ahead: asked for 512": 512}  # more tokens than are produced: a stop token ends them


def ours(overrides: list[str], max_tokens: int | None = None) -> tuple[dict[str, Any], Rows]:
    """The trace for vLLM, and what kvlab decided in each step."""
    config = configure([*BASE, *overrides])
    decided = decide(config, max_tokens)
    plan = decided.plan
    trace = {
        "block_size": config.kv.block_size,
        "num_blocks": plan.pool.num_blocks,
        "max_num_seqs": config.scheduler.max_batch_size,
        "max_num_batched_tokens": config.scheduler.max_batched_tokens,
        "max_model_len": config.model.max_seq_len,
        "vocab_size": plan.model.vocab_size,
        "prefix_caching": config.kv.prefix_sharing,
        "reserve_full_isl": config.scheduler.reserve_prompt,
        "ahead": config.scheduler.ahead,
        "policy": config.scheduler.order,
        "kinds": ["state" if group.has_state else group.window for group in plan.pool.groups] or [None],
        "exports": any(group.states > 2 for group in plan.pool.groups),
        "requests": decided.requests,
    }
    return trace, decided.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="the interpreter that has vLLM")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {}
    for name in arguments.workloads:
        trace, mine = ours(WORKLOADS[name], ASKED.get(name))
        other = decided_by(arguments.vllm_python, Path(__file__).with_name("vllm_scheduler.py"), trace)
        found[name] = compare(mine, other)
        if arguments.json:
            arguments.json.write_text(json.dumps({"found": found, "last": [mine, other]}, default=int))
    print(table(found))


if __name__ == "__main__":
    main()
