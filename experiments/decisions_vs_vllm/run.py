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
import math
import subprocess
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.runs import configure
from kvlab.core import Request, RequestRecord
from kvlab.engine.build import build_engine
from kvlab.engine.core import EngineCore
from kvlab.lab.results.log import RunLog
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import plan_run
from kvlab.simulation.timings import Deployment, StepTiming, Timing
from kvlab.simulation.timings.base import Counts

BASE = [
    "executor=simulated",
    "hardware=h100_sxm",
    "model=qwen3_tiny",
    "model.max_seq_len=4096",
    "scheduler.ahead=false",
    "scheduler.max_batched_tokens=512",
    "scheduler.max_batch_size=32",
]
OUTPUT = "workload.output_len={min: 16, max: 96}"
PROMPT = "workload.prompt_len={min: 32, max: 300}"
BURST = ["workload=burst48", PROMPT, OUTPUT]
POISSON = ["workload.num_requests=200", "workload.arrival=poisson", "workload.rate=0.5"]
ARRIVALS = [*BURST, *POISSON, "kv.num_blocks=120"]
SHARED = [
    "workload=shared_prefix", *POISSON, "workload.system_len=100", "workload.num_groups=8",
    "workload.group_len=150", PROMPT, OUTPUT, "kv.num_blocks=400",
]  # fmt: skip
CONVERSATIONS = [
    "workload=multi_turn", "workload.num_requests=24", "workload.turns=4", "workload.think_s=0", OUTPUT,
    "workload.prompt_len={min: 32, max: 150}", "kv.num_blocks=500",
]  # fmt: skip
CHUNKS = ["scheduler.reserve_prompt=false", "scheduler.max_batched_tokens=128"]
MANY_CHUNKS = ["workload.prompt_len={min: 300, max: 1500}", "scheduler.max_batched_tokens=64"]
AHEAD, WINDOWS, UNSHARED = "scheduler.ahead=true", "model=gemma3_tiny", "kv.prefix_sharing=false"
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
}  # fmt: skip
FIELDS = ("admitted", "resumed", "preempted", "tokens", "hits", "evicted", "in_use")


class OneSecond(StepTiming):
    """Every step takes as long, so that neither engine's decisions depend on what steps cost."""

    includes_host = True

    @classmethod
    def of(cls, deployment: Deployment) -> Timing:
        return cls()

    @property
    def description(self) -> str:
        return "one second for each step"

    def device_s(self, new_tokens: Counts, lengths: Counts, sampled: int) -> float:
        return 1.0


def ours(overrides: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The trace for vLLM, and what kvlab decided in each step."""
    config = configure([*BASE, *overrides])
    plan = replace(plan_run(config), timing=OneSecond())
    requests = plan.requests
    if not config.scheduler.ahead:
        requests = [
            replace(each, arrival_s=float(math.floor(each.arrival_s))) if each.follows is None else each
            for each in requests
        ]
    engine = build_engine(plan)
    prompts: dict[str, tuple[int, ...]] = {}
    priorities = {each.request_id: each.priority for each in requests}
    submit = engine.submit

    def noted(request: Request, *arguments: Any, **others: Any) -> None:
        prompts[request.request_id] = tuple(request.prompt_token_ids)
        submit(request, *arguments, **others)

    engine.submit = noted  # type: ignore[method-assign]
    tokens = _scheduled_tokens(engine)
    log = drive(engine, requests, at_once=False)
    steps = _decisions(log, tokens)
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
        "windows": [group.window for group in plan.pool.groups] or [None],
        "requests": [
            {
                "id": record.request_id,
                "arrival": record.arrival_s if config.scheduler.ahead else math.ceil(record.arrival_s),
                "priority": priorities[record.request_id],
                "prompt": prompts[record.request_id],
                "output": record.output_token_ids,
            }
            for record in log.records
        ],
    }
    return trace, steps


def _scheduled_tokens(engine: EngineCore) -> list[dict[str, int]]:
    """Filled with the tokens of each sequence in each step, while the engine runs."""
    found: list[dict[str, int]] = []
    build = engine._batches.build

    def noted(start: float) -> Any:
        batch = build(start)
        plans = batch.plans(mixed=True)
        found.append(
            {
                sequence.request.request_id: count
                for each in plans
                for sequence, count in zip(each.sequences, map(int, each.num_tokens), strict=True)
            }
        )
        return batch

    engine._batches.build = noted  # type: ignore[assignment,method-assign]
    return found


def _decisions(log: RunLog, tokens: list[dict[str, int]]) -> list[dict[str, Any]]:
    """A row for each step that computed something."""
    at: dict[str, dict[float, list[str]]] = {
        name: defaultdict(list) for name in ("admitted", "resumed", "preempted")
    }

    def note(record: RequestRecord) -> None:
        if record.scheduled_s is not None:
            at["admitted"][record.scheduled_s].append(record.request_id)
        for name, times in (("resumed", record.resumed_s), ("preempted", record.preempted_s)):
            for when in times:
                at[name][when].append(record.request_id)

    for record in log.records:
        note(record)
    scheduled = iter([each for each in tokens if each])
    rows = []
    for step in log.steps:
        if not step.batch_seqs or step.pool is None or step.counters is None:
            continue
        rows.append(
            {"time": step.start_s}
            | {name: sorted(found[step.start_s]) for name, found in at.items()}
            | {
                "tokens": next(scheduled),
                "partial": step.batch_seqs - step.sampled_tokens,
                "hits": step.counters.hit_tokens,
                "evicted": step.counters.evicted_blocks,
                "in_use": step.pool.blocks_in_use,
            }
        )
    return rows


def theirs(python: str, trace: dict[str, Any]) -> list[dict[str, Any]]:
    """What vLLM's scheduler decided in each step."""
    script = str(Path(__file__).with_name("vllm_scheduler.py"))
    done = subprocess.run([python, script], input=json.dumps(trace), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def compare(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps and sums of both, the steps that differ, and how many of those had a prompt in chunks just before."""
    pairs = list(enumerate(zip(one, two, strict=False)))
    others = {name: [number for number, (a, b) in pairs if a[name] != b[name]] for name in FIELDS}
    differ = sorted({number for found in others.values() for number in found})
    chunks = sum(any(row["partial"] for row in one[max(0, number - 2) : number + 1]) for number in differ)
    sums = {
        name: [
            sum(len(row[name]) if isinstance(row[name], list) else row[name] for row in rows) for rows in (one, two)
        ]
        for name in ("admitted", "preempted", "hits", "evicted")
    }
    counts = {name: len(found) for name, found in others.items()}
    return {
        "steps": [len(one), len(two)],
        "sums": sums,
        "differ": len(differ),
        "chunks": chunks,
        "by_field": counts,
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown, a row for each workload; both figures where they differ."""
    rows = [
        "| workload | steps | admissions | preemptions | hit tokens | evicted | steps that differ | in what |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in found.items():
        pairs = [result["steps"], *result["sums"].values()]
        cells = [f"{a:,}" if a == b else f"{a:,} / {b:,}" for a, b in pairs]
        what = ", ".join(f"{field} {count}" for field, count in result["by_field"].items() if count)
        differ = f"{result['differ']}, with a prompt in chunks {result['chunks']}" if result["differ"] else "0"
        rows.append(f"| {name} | {' | '.join(cells)} | {differ} | {what} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="the interpreter that has vLLM")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {}
    for name in arguments.workloads:
        trace, mine = ours(WORKLOADS[name])
        other = theirs(arguments.vllm_python, trace)
        found[name] = compare(mine, other)
        if arguments.json:
            arguments.json.write_text(json.dumps({"found": found, "last": [mine, other]}, default=int))
    print(table(found))


if __name__ == "__main__":
    main()
