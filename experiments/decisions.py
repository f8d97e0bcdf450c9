"""kvlab's decisions step by step, to be compared with those of another engine's own scheduler."""

from __future__ import annotations

import json
import math
import subprocess
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvlab.config import RunConfig
from kvlab.core import Request, RequestRecord, SequenceSpec
from kvlab.engine.build import build_engine
from kvlab.engine.core import EngineCore
from kvlab.engine.executors.simulated import SimulatedExecutor
from kvlab.lab.results.log import RunLog
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import RunPlan, plan_run
from kvlab.simulation.timings import Deployment, StepTiming, Timing
from kvlab.simulation.timings.base import Counts

Row = dict[str, Any]  # what was decided in a step
Rows = list[Row]

# Workloads that all comparisons have: overrides, without the memory for them.
OUTPUT = "workload.output_len={min: 16, max: 96}"
PROMPT = "workload.prompt_len={min: 32, max: 300}"
LONG = "workload.prompt_len={min: 300, max: 1500}"
POISSON = ["workload.num_requests=200", "workload.arrival=poisson", "workload.rate=0.5"]
BURST = ["workload=burst48", PROMPT, OUTPUT]
ARRIVALS = [*BURST, *POISSON]
SHARED = [
    "workload=shared_prefix", *POISSON, "workload.system_len=100", "workload.num_groups=8",
    "workload.group_len=150", PROMPT, OUTPUT,
]  # fmt: skip
CONVERSATIONS = [
    "workload=multi_turn", "workload.num_requests=24", "workload.turns=4", "workload.think_s=0", OUTPUT,
    "workload.prompt_len={min: 32, max: 150}",
]  # fmt: skip
AHEAD, UNSHARED = "scheduler.ahead=true", "kv.prefix_sharing=false"

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


class Decided(NamedTuple):
    """A run of kvlab: what it was, a row for each step, and its requests for the other engine."""

    plan: RunPlan
    rows: Rows
    requests: list[dict[str, Any]]


def decide(config: RunConfig, max_tokens: int | None = None) -> Decided:
    """Run a workload, whose requests may ask for more tokens than they produce, in steps of one second."""
    plan = replace(plan_run(config), timing=OneSecond())
    requests = plan.requests
    if not config.scheduler.ahead:
        requests = [
            replace(each, arrival_s=float(math.floor(each.arrival_s))) if each.follows is None else each
            for each in requests
        ]
    if max_tokens is not None:
        requests = [_asking_for(max_tokens, plan, each) for each in requests]
    engine = build_engine(plan)
    asked: dict[str, Request] = {}
    submit = engine.submit

    def noted(request: Request, *arguments: Any, **others: Any) -> None:
        asked[request.request_id] = request
        submit(request, *arguments, **others)

    engine.submit = noted  # type: ignore[method-assign]
    tokens = _scheduled_tokens(engine)
    log = drive(engine, requests, at_once=False)
    return Decided(
        plan,
        _decisions(log, tokens),
        [
            {
                "id": record.request_id,
                "arrival": record.arrival_s if config.scheduler.ahead else math.ceil(record.arrival_s),
                "priority": asked[record.request_id].priority,
                "prompt": tuple(asked[record.request_id].prompt_token_ids),
                "output": record.output_token_ids,
                "max_tokens": asked[record.request_id].sampling.max_tokens,
                "ignore_eos": asked[record.request_id].sampling.ignore_eos,
                "stop": asked[record.request_id].sampling.stop_token_ids,
            }
            for record in log.records
        ],
    )


def _asking_for(max_tokens: int, plan: RunPlan, request: Request) -> Request:
    """A request for so many tokens, which ends by a stop token where the workload's own would have ended."""
    assert isinstance(plan.timing, StepTiming)
    executor = SimulatedExecutor(plan.model, plan.timing, plan.config.framework)
    spec = SequenceSpec(request.request_id, 0, request.sampling)
    last = int(executor._draw([spec], np.array([request.sampling.max_tokens - 1]))[0])
    sampling = replace(request.sampling, max_tokens=max_tokens, ignore_eos=False, stop_token_ids=(last,))
    return replace(request, sampling=sampling)


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


def _decisions(log: RunLog, tokens: list[dict[str, int]]) -> Rows:
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
            {"time": step.start_s, "kind": "prefill" if step.prefill_tokens else "decode"}
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


def decided_by(python: str, script: Path, trace: Any) -> Any:
    """What another engine's scheduler decided: what a script writes that reads the trace."""
    done = subprocess.run(
        [python, str(script)], input=json.dumps(trace), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout)


def compare(one: Rows, two: Rows, fields: tuple[str, ...] = FIELDS) -> dict[str, Any]:
    """Steps and sums of both, the steps that differ, and how many of those had a prompt in chunks just before."""
    pairs = list(enumerate(zip(one, two, strict=False)))
    others = {name: [number for number, (a, b) in pairs if a[name] != b[name]] for name in fields}
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
        "first": differ[0] if differ else None,
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


def report(
    rows: dict[str, tuple[Rows, Rows]],
    other: str,
    fields: tuple[str, ...] = FIELDS,
    *,
    steps: int = 0,
    json_path: Path | None = None,
) -> None:
    """Print a table of workloads, of which there are kvlab's rows and the other engine's, and of each the first
    step that differs, with so many `steps` around it.
    """
    found = {name: compare(mine, theirs, fields) for name, (mine, theirs) in rows.items()}
    print(table(found), end="\n\n")
    for name, (mine, theirs) in rows.items():
        number = found[name]["first"]
        if number is None:
            continue
        print(f"- {name}: {in_words(number, mine, theirs, other, fields)}")
        for each in range(max(0, number - steps + 1), number + steps):
            for who, decided in (("kvlab", mine), (other, theirs)):
                if each < len(decided):
                    line = ", ".join(f"{key} {value}" for key, value in decided[each].items())
                    print(f"    {each} {who:{len(other)}} {line}")
    if json_path is not None:
        json_path.write_text(json.dumps({"found": found, "rows": rows}, default=int))


def in_words(number: int, one: Rows, two: Rows, other: str, fields: tuple[str, ...]) -> str:
    """How a step differs."""
    parts = []
    for name in fields:
        mine, theirs = one[number][name], two[number][name]
        if mine != theirs:
            parts.append(f"{name}: kvlab {_beside(mine, theirs)}, {other} {_beside(theirs, mine)}")
    return f"step {number} at {two[number]['time']:g} s: " + "; ".join(parts)


def _beside(value: Any, other: Any) -> str:
    """What is in it and not in the other."""
    if isinstance(value, dict):
        return str({key: count for key, count in value.items() if other.get(key) != count} or "none of these")
    return str(value)
