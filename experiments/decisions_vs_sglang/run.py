"""kvlab's decisions beside those of SGLang's own scheduler, radix cache and allocators, step by step.

    python -m experiments.decisions_vs_sglang.run --sglang-python ENVIRONMENT/bin/python [--json FILE]

Both get the same requests, the same memory and limits, pages of one size, and steps of one second each. Neither
computes a model; SGLang is given the tokens that kvlab drew. Every step is compared: whether it computes prompts or
decodes, who is admitted, resumed and retracted, how many tokens of whom, prompt tokens found in the radix cache,
evicted pages, pages in use. Prints a table, a row for each workload, and the first step of each that differs.
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
    decided_by,
    report,
)
from experiments.runs import configure

#: What a simulated SGLang is told, but for the sizes: the one table to change when its settings do.
SGLANG = [
    "scheduler.order=prefill_alone",
    "scheduler.reserve_output=true",
    "scheduler.conservativeness=1",
    "scheduler.admission_reserve=0",
    "scheduler.aging_s=null",
]
BASE = [
    "executor=simulated",
    "hardware=h100_sxm",
    "framework=sglang",
    "model=qwen3_8b",
    "model.max_seq_len=16384",
    "scheduler.ahead=false",
    "scheduler.max_batched_tokens=512",  # chunked_prefill_size
    "scheduler.max_batch_size=32",  # max_running_requests
    *SGLANG,
]
MANY = [
    "workload.num_requests=600", "workload.rate=0.6", "workload.prompt_len={min: 32, max: 100}",
    "workload.output_len={min: 150, max: 200}", "scheduler.max_batch_size=256", "scheduler.max_batched_tokens=1024",
]  # fmt: skip


class Workload(NamedTuple):
    """A workload, the tokens for which there is memory, and the most that its requests ask for, if these are more
    than they produce.
    """

    overrides: list[str]
    tokens: int
    max_tokens: int | None = None


def of(*overrides: str, pages: int, max_tokens: int | None = None) -> Workload:
    """A workload with memory for so many pages of 16 tokens."""
    return Workload(list(overrides), 16 * pages, max_tokens)


CHUNKS = [LONG, "workload.rate=0.3"]
WORKLOADS = {
    "burst, memory for all": of(*BURST, pages=2000),
    "burst, prompts in chunks": of(*BURST, LONG, pages=6000),
    "arrivals, memory for all": of(*ARRIVALS, pages=2000),
    "arrivals, prompts in chunks": of(*ARRIVALS, *CHUNKS, pages=6000),
    "eight at once": of(*BURST, "workload.num_requests=100", "scheduler.max_batch_size=8", pages=2000),
    "shared prefixes, memory for all": of(*SHARED, pages=8000),
    "conversations, memory for all": of(*CONVERSATIONS, pages=4000),
    "asked for 512, memory for all": of(*ARRIVALS, pages=6000, max_tokens=512),
    "burst, little memory": of(*BURST, pages=150),
    "arrivals, little memory": of(*ARRIVALS, pages=120),
    "arrivals, no prefix cache": of(*ARRIVALS, UNSHARED, pages=120),
    "shared prefixes, little memory": of(*SHARED, pages=400),
    "conversations, little memory": of(*CONVERSATIONS, pages=300),
    "asked for 512, little memory": of(*ARRIVALS, pages=150, max_tokens=512),
    "asked for 512, no prefix cache": of(*ARRIVALS, UNSHARED, pages=150, max_tokens=512),
    "asked for 512, prompts in chunks": of(*ARRIVALS, LONG, "workload.rate=0.1", pages=300, max_tokens=512),
    "asked for 6,000, little memory": of(*ARRIVALS, pages=600, max_tokens=6000),
    "asked for 200, many": of(*ARRIVALS, *MANY, pages=800, max_tokens=200),
    "asked for 200, many, shared prefixes": of(*SHARED, *MANY, pages=1000, max_tokens=200),
    "overlap: burst, memory for all": of(*BURST, AHEAD, pages=2000),
    "overlap: arrivals, prompts in chunks": of(*ARRIVALS, *CHUNKS, AHEAD, pages=6000),
    "overlap: shared prefixes, memory for all": of(*SHARED, AHEAD, pages=8000),
    "overlap: asked for 512, memory for all": of(*ARRIVALS, AHEAD, pages=6000, max_tokens=512),
    "overlap: arrivals, little memory": of(*ARRIVALS, AHEAD, pages=120),
    "overlap: asked for 512, little memory": of(*ARRIVALS, AHEAD, pages=150, max_tokens=512),
    "overlap: no prefix cache, prompts in chunks": of(*ARRIVALS, *CHUNKS, UNSHARED, AHEAD, pages=300),
    "overlap: asked for 200, many": of(*ARRIVALS, *MANY, AHEAD, pages=800, max_tokens=200),
    "overlap: asked for 160, many": of(*ARRIVALS, *MANY, AHEAD, pages=400, max_tokens=160),
    "overlap: asked for 200, many, shared prefixes": of(*SHARED, *MANY, AHEAD, pages=1000, max_tokens=200),
}
FIELDS = ("time", "kind", *decisions.FIELDS)


def ours(workload: Workload, page_size: int = 1) -> tuple[dict[str, Any], Rows]:
    """The trace for SGLang, and what kvlab decided in each step."""
    blocks = workload.tokens // page_size
    config = configure([*BASE, *workload.overrides, f"kv.block_size={page_size}", f"kv.num_blocks={blocks}"])
    decided = decide(config, workload.max_tokens)
    plan = decided.plan
    trace = {
        "page_size": page_size,
        "num_tokens": blocks * page_size,
        "max_running_requests": config.scheduler.max_batch_size,
        "chunked_prefill_size": config.scheduler.max_batched_tokens,
        "max_model_len": config.model.max_seq_len,
        "vocab_size": plan.model.vocab_size,
        "prefix_caching": config.kv.prefix_sharing,
        "overlap": config.scheduler.ahead,
        "requests": decided.requests,
    }
    return trace, decided.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang-python", required=True, help="the interpreter that has SGLang")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--page-size", type=int, default=1, help="tokens of a page of both; SGLang's default is 1")
    parser.add_argument("--steps", type=int, default=0, help="how many steps around the first difference to print")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    script = Path(__file__).with_name("sglang_scheduler.py")
    own = {name: ours(WORKLOADS[name], arguments.page_size) for name in arguments.workloads}
    theirs = decided_by(arguments.sglang_python, script, [trace for trace, _ in own.values()])
    rows = {name: (mine, other) for (name, (_, mine)), other in zip(own.items(), theirs, strict=True)}
    report(rows, "SGLang", FIELDS, steps=arguments.steps, json_path=arguments.json)


if __name__ == "__main__":
    main()
