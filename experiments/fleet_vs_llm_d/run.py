"""Replicas behind four routers, as llm-d measured them in two reports: predicted from silicon tables alone.

    python -m experiments.fleet_vs_llm_d.run [--report 37] [--routers precise random] [--seeds 0 1 2]
    python -m experiments.fleet_vs_llm_d.run [--framework vllm] [--open 800]

Writes predicted/<router>.json for each router that has none yet, so that it goes on where it was stopped. The
reports are of 2025-09-09 and 2025-09-21, and their repository then deployed vLLM 0.10.0 in its Docker image, which
has FlashInfer: that is what is simulated unless another is asked for.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import product
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
OUTPUT = 1000
FRAMEWORKS = {
    "vllm_synchronous": [
        "framework=vllm_synchronous",
        "framework.version=0.10.0",
        "framework.flashinfer_sampler=true",  # of the Docker image
    ],
    "vllm": ["framework=vllm"],  # the newest
}
SETTINGS = (
    "executor=simulated",
    "hardware=h100_sxm",
    "kv.block_size=64",  # what the precise router's configuration says, and has to be the servers' own
    "tracking=off",
    "figures=false",
)


class Report(NamedTuple):
    """A deployment that llm-d measured, and its load: groups of users whose prompts begin with the same text.

    A prompt has `parts` parts of `part` tokens, of which a group shares the first `shared`. llm-d asks for a number
    of random ids; its client sends them as text, of which the server's tokenizer makes more (prompt_lengths.py).
    """

    settings: tuple[str, ...]
    pool: int  # tokens of a replica, as reported
    groups: int
    users: int  # of a group
    part: int
    shared: int
    parts: int
    poisson: bool  # or a constant rate, in the words of its client
    warm_up: tuple[int, int]
    stages: tuple[tuple[int, int], ...]  # requests a second, and for how many seconds
    #: Of the tokens that are generated, what inference-perf counts: it tokenizes an answer's text again. A later
    #: report of the first load has answers of 937 tokens in the mean where 1,000 were asked for and the end was
    #: ignored (llm-d/llm-d, guides/precise-prefix-cache-aware/README.md at 019a3f3).
    counted: float = 1.0


REPORTS = {
    "73": Report(
        ("model=qwen3_32b", "executor.tensor_parallel=2", "fleet.replicas=8"),
        pool=307_328,
        groups=150,
        users=5,
        part=1263,
        shared=5,
        parts=6,
        poisson=True,
        warm_up=(15, 50),
        stages=(
            *((3, 20), (10, 20), (15, 20), (20, 38), (22, 34), (25, 30), (30, 25), (35, 21)),
            *((40, 38), (43, 36), (46, 33), (49, 30), (52, 29), (55, 27), (57, 26), (60, 25)),
        ),
        counted=0.937,
    ),
    "37": Report(
        (
            *("model=llama3_1_70b", "executor.tensor_parallel=4", "fleet.replicas=4"),
            *("fleet.weights.prefix=2", "fleet.weights.kv=1", "fleet.weights.queue=1"),
        ),
        pool=461_376,
        groups=83,
        users=3,
        part=1044,
        shared=8,
        parts=9,
        poisson=False,
        warm_up=(9, 30),
        stages=((3, 210), (4, 180), (5, 120), (6, 120), (8, 90), (10, 70), (12, 60), (15, 50), (20, 50)),
    ),
}


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


def prompts(report: Report, vocab_size: int, seed: int) -> list[HashedPrompt]:
    """Those of all users, in the order in which they come."""
    ids = [
        [
            *(group * report.parts + part for part in range(report.shared)),
            *(2**20 * part + group * report.users + user for part in range(1, report.parts - report.shared + 1)),
        ]
        for group in range(report.groups)
        for user in range(report.users)
    ]
    np.random.default_rng(seed).shuffle(ids)
    return [HashedPrompt(parts, report.part, report.parts * report.part, vocab_size, 1) for parts in ids]


def poisson(rate: float, random: np.random.Generator) -> Iterator[float]:
    """As inference-perf spaces them: a Poisson number in each second, gaps exponential and made to fill it."""
    second = 0.0
    while True:
        gaps = random.exponential(size=random.poisson(rate))
        yield from second + np.cumsum(gaps) / (gaps.sum() or 1.0)
        second += 1.0


def constant(rate: float, seconds: float, random: np.random.Generator) -> Iterator[float]:
    """What inference-perf calls a constant rate: exponential gaps that are made to fill the whole time."""
    gaps = random.exponential(size=int(rate * seconds))
    yield from np.cumsum(gaps) * (seconds / gaps.sum())


def simulate(name: str, router: str, seed: int, framework: str, most_open: int | None = None) -> dict[str, object]:
    """All stages of a report behind one router. `most_open`: requests that the client has open at once, at most; it
    sends others later."""
    begin, report = time.process_time(), REPORTS[name]
    own = [*report.settings, *FRAMEWORKS[framework]]
    own += [f"workload.concurrency={most_open}"] if most_open else []
    plan = plan_run(configure([*SETTINGS, *own, f"fleet.router={router}", f"seed={seed}"]))
    texts, random = prompts(report, plan.model.vocab_size, seed), np.random.default_rng([seed, 1])
    fleet = make_engine(plan, Profiler(enabled=False))
    if not isinstance(fleet, Fleet):
        raise TypeError("these settings make no fleet")
    sampling = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    found, start_s, number = [], 0.0, 0
    for rate, seconds in (report.warm_up, *report.stages):
        times = poisson(rate, random) if report.poisson else constant(rate, seconds, random)
        requests = [
            Request(str(number + at), texts[at % len(texts)], sampling, start_s + float(next(times)))
            for at in range(rate * seconds)
        ]
        number, cpu_s, sent = number + len(requests), time.process_time(), len(fleet.routed)
        log = drive(fleet, requests, concurrency=most_open)
        start_s = max(record.finished_s for record in log.records)
        each = [routed.choice.replica for routed in fleet.routed[sent:]]
        found.append(figures(rate, log, each, len(fleet.replicas), time.process_time() - cpu_s))
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


def figures(rate: float, log: RunLog, chosen: list[int], replicas: int, cpu_s: float) -> Stage:
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
        imbalance=float(np.bincount(chosen).max() / (len(chosen) / replicas)),
        cpu_s=cpu_s,
    )


def main() -> None:
    """Simulate the routers that have no file yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", choices=REPORTS, default="73", help="names the files too")
    parser.add_argument("--routers", nargs="+", default=list(ROUTERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--open", type=int, help="most requests that the client has open; names the files too")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="vllm_synchronous", help="names the files too")
    options = parser.parse_args()
    mark = file_mark(options.report, options.framework, options.open)
    for seed, router in product(options.seeds, options.routers):
        path = predicted_file(router, mark, seed)
        if not path.exists():
            asked = (seed, options.framework, options.open)
            PREDICTED.mkdir(exist_ok=True)
            path.write_text(json.dumps(simulate(options.report, router, *asked), indent=1) + "\n")


def predicted_file(router: str, mark: str, seed: int) -> Path:
    """Where the figures of a router and a seed are, simulated as the mark says."""
    return PREDICTED / (f"{router}{mark}" + (f"_seed_{seed}" if seed else "") + ".json")


def file_mark(report: str, framework: str, most_open: int | None) -> str:
    """What a file's name says of how it was simulated, behind the router's name."""
    marks = [f"report_{report}"] if report != "73" else []
    marks += [framework] if framework != "vllm_synchronous" else []
    marks += [f"open_{most_open}"] if most_open else []
    return "".join(f"_{mark}" for mark in marks)


if __name__ == "__main__":
    main()
