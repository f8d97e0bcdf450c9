"""Eight replicas behind four routers, as llm-d measured them: predicted from silicon tables alone.

    python -m experiments.fleet_vs_llm_d.run [--routers precise random] [--seed 1] [--framework vllm]
    python -m experiments.fleet_vs_llm_d.run --open 800 [--blocks 4802]

Writes predicted/<router>.json for each router that has none yet, so that it goes on where it was stopped. The
report is of 2025-09-21, and its repository then deployed vLLM 0.10.0: that is what is simulated unless another is
asked for.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from experiments.runs import configure
from kvlab.core import Request, SamplingParams
from kvlab.fleet.fleet import Fleet
from kvlab.hashed_prompt import HashedPrompt
from kvlab.lab.results.log import RunLog
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import plan_run
from kvlab.lab.run.profile import Profiler
from kvlab.lab.run.serve import make_engine

PREDICTED = Path(__file__).parent / "predicted"
ROUTERS = ("precise", "estimated", "load", "random")
WARM_UP = (15, 50)
#: Requests a second, and for how many seconds.
STAGES = (
    *((3, 20), (10, 20), (15, 20), (20, 38), (22, 34), (25, 30), (30, 25), (35, 21)),
    *((40, 38), (43, 36), (46, 33), (49, 30), (52, 29), (55, 27), (57, 26), (60, 25)),
)
GROUPS, USERS, OUTPUT = 150, 5, 1000
FRAMEWORKS = {
    "vllm_synchronous": ["framework=vllm_synchronous", "framework.version=0.10.0"],
    "vllm": ["framework=vllm"],  # the newest
}
#: Tokens of a part of a prompt, parts that a group shares, parts in all. llm-d asks for 1,200 random ids a part;
#: its client sends them as text, of which the server's tokenizer makes 1,263 (prompt_lengths.py).
_PART, _SHARED, _PARTS = 1263, 5, 6
SETTINGS = (
    "executor=simulated",
    "hardware=h100_sxm",
    "executor.tensor_parallel=2",
    "model=qwen3_32b",
    "kv.block_size=64",  # what the precise router's configuration says, and has to be the servers' own
    "tracking=off",
    "figures=false",
    "fleet.replicas=8",
)


class Stage(NamedTuple):
    """The figures of a stage."""

    requests_per_s: float
    output_tokens_per_s: float  # from the first request sent to the last one's end
    completed_per_s: float  # the same; llm-d's column of this name counts from the first sent to the last sent
    sent_per_s: float
    ttft_p90_s: float
    ttft_mean_s: float
    itl_mean_s: float
    hit_share: float  # of the prompts' tokens
    preempted: int
    imbalance: float  # most requests that a replica was sent, of the mean
    cpu_s: float


def prompts(vocab_size: int, seed: int) -> list[HashedPrompt]:
    """The 750 prompts, in the order in which they come."""
    ids = [
        [*(group * _PARTS + part for part in range(_SHARED)), 2**20 + group * USERS + user]
        for group in range(GROUPS)
        for user in range(USERS)
    ]
    np.random.default_rng(seed).shuffle(ids)
    return [HashedPrompt(parts, _PART, _PARTS * _PART, vocab_size, 1) for parts in ids]


def arrivals(rate: float, random: np.random.Generator) -> Iterator[float]:
    """As inference-perf spaces them: a Poisson number in each second, gaps exponential and made to fill it."""
    second = 0.0
    while True:
        gaps = random.exponential(size=random.poisson(rate))
        yield from second + np.cumsum(gaps) / (gaps.sum() or 1.0)
        second += 1.0


def simulate(
    router: str, seed: int, framework: str, most_open: int | None = None, blocks: int | None = None
) -> dict[str, object]:
    """All stages behind one router. `most_open`: the client keeps no more requests open, and sends others later.
    `blocks`: those of a replica, where they are not to be planned."""
    begin = time.process_time()
    own = [*FRAMEWORKS[framework], *([f"workload.concurrency={most_open}"] if most_open else [])]
    own += [f"kv.num_blocks={blocks}", "executor.memory_utilization=0.98"] if blocks else []
    plan = plan_run(configure([*SETTINGS, *own, f"fleet.router={router}", f"seed={seed}"]))
    texts, random = prompts(plan.model.vocab_size, seed), np.random.default_rng([seed, 1])
    fleet = make_engine(plan, Profiler(enabled=False))
    if not isinstance(fleet, Fleet):
        raise TypeError("these settings make no fleet")
    sampling = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    found, start_s, number = [], 0.0, 0
    for rate, seconds in (WARM_UP, *STAGES):
        times = arrivals(rate, random)
        requests = [
            Request(str(number + at), texts[at % len(texts)], sampling, start_s + float(next(times)))
            for at in range(rate * seconds)
        ]
        number, cpu_s, sent = number + len(requests), time.process_time(), len(fleet.routed)
        log = drive(fleet, requests, concurrency=most_open)
        start_s = max(record.finished_s for record in log.records)
        each = [routed.choice.replica for routed in fleet.routed[sent:]]
        found.append(figures(rate, log, each, time.process_time() - cpu_s))
        print(f"{router} {found[-1]}", flush=True)
    return {
        "router": router,
        "seed": seed,
        "most_open": most_open,
        "pool_tokens": plan.pool.num_blocks * plan.pool.block_size,
        "timing": plan.chosen["timing"],
        "cpu_s": time.process_time() - begin,
        "stages": [stage._asdict() for stage in found[1:]],
    }


def figures(rate: float, log: RunLog, replicas: list[int], cpu_s: float) -> Stage:
    """The figures of a stage's requests."""
    records = log.records
    sent = [record.arrival_s for record in records]
    lasted = max(record.finished_s for record in records) - min(sent)
    gaps = np.concatenate([np.diff(record.token_times_s) for record in records])
    ttft = [record.token_times_s[0] - record.arrival_s for record in records]
    return Stage(
        requests_per_s=rate,
        output_tokens_per_s=sum(len(record.token_times_s) for record in records) / lasted,
        completed_per_s=log.completed / lasted,
        sent_per_s=len(records) / (max(sent) - min(sent)),
        ttft_p90_s=float(np.percentile(ttft, 90)),
        ttft_mean_s=fmean(ttft),
        itl_mean_s=float(gaps.mean()),
        hit_share=log.steps.column("counters.hit_tokens").sum() / log.steps.column("counters.prompt_tokens").sum(),
        preempted=int(log.steps.column("preempted").sum()),
        imbalance=float(np.bincount(replicas, minlength=8).max() / (len(replicas) / 8)),
        cpu_s=cpu_s,
    )


def main() -> None:
    """Simulate the routers that have no file yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--routers", nargs="+", default=list(ROUTERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--open", type=int, help="most requests that the client has open; names the files too")
    parser.add_argument("--blocks", type=int, help="of a replica, not planned; names the files too")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="vllm_synchronous", help="names the files too")
    options = parser.parse_args()
    marks = [options.framework] if options.framework != "vllm_synchronous" else []
    marks += [f"open_{options.open}"] if options.open else []
    marks += [f"blocks_{options.blocks}"] if options.blocks else []
    for router in options.routers:
        path = PREDICTED / ("_".join([router, *marks]) + ".json")
        if not path.exists():
            found = simulate(router, options.seed, options.framework, options.open, options.blocks)
            PREDICTED.mkdir(exist_ok=True)
            path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
