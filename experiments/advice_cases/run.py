"""Twelve kinds of traffic with one known best change each: is it the first advice?

python -m experiments.advice_cases.run [NAME ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from kvlab.cli.advise import compose_today, words_of
from kvlab.cli.settings import read_settings
from kvlab.lab.advise.advice import Advice
from kvlab.lab.advise.adviser import Adviser
from kvlab.lab.advise.settings import AdviseSettings

DEVICE = ("hardware=h100_sxm", "model=llama3_1_8b", "tracking=off")
SMALL = ("hardware=l4", "model=llama3_2_3b", "tracking=off")
POISSON = ("workload.arrival=poisson",)


class Case(NamedTuple):
    """Settings, and the kind of the change that is best: of the first advice; None: change nothing."""

    words: tuple[str, ...]
    best: str | None
    why: str


def lengths(prompt: str, output: str) -> tuple[str, ...]:
    """Settings of lengths, MIN-MAX in tokens."""
    parts = (("prompt_len", prompt), ("output_len", output))
    return tuple(
        f"workload.{name}.{end}={value}"
        for name, span in parts
        for end, value in zip(("min", "max"), span.split("-"), strict=True)
    )


CASES = {
    "small_pool": Case(
        (*DEVICE, *POISSON, "workload.rate=8", "workload.num_requests=160", *lengths("400-600", "200-300"),
         "kv.num_blocks=400"),
        "size of the pool", "6,400 tokens of cache where the device holds fifty times that",
    ),
    "small_batch": Case(
        (*DEVICE, *POISSON, "workload.rate=8", "workload.num_requests=160", *lengths("200-300", "200-300"),
         "scheduler.max_batch_size=4"),
        "sequences of a step", "four sequences at once where there is room for hundreds",
    ),
    "small_budget": Case(
        (*DEVICE, *POISSON, "workload.rate=4", "workload.num_requests=160", *lengths("6000-8000", "20-30"),
         "scheduler.max_batched_tokens=256", "scheduler.max_batch_size=64"),
        "tokens of a step", "prompts of 7,000 tokens in pieces of 256: weights are read 28 times for each",
    ),
    "no_sharing": Case(
        (*DEVICE, *POISSON, "workload.rate=4", "workload.num_requests=160", "workload.system_len=6000",
         *lengths("100-200", "50-100"), "kv.prefix_sharing=false"),
        "prefix cache", "a system prompt of 6,000 tokens is computed for each request",
    ),
    "large_blocks": Case(
        (*DEVICE, *POISSON, "workload.rate=12", "workload.num_requests=240", "workload.num_groups=3",
         "workload.group_len=1000", *lengths("20-40", "5-10"), "kv.block_size=1024", "keep=executor.weights"),
        "block size", "prefixes of 1,000 tokens do not fill a block of 1,024, so that none is found",
    ),
    "hot_prefixes": Case(
        (*SMALL, *POISSON, "workload.rate=4.5", "workload.num_requests=400", "workload.num_groups=400",
         "workload.group_len=3000", "workload.zipf=1.2", *lengths("100-200", "5-10"), "kv.num_blocks=1600",
         "keep=kv.num_blocks,kv.offload,kv.dtype,executor.weights"),
        "eviction", "few prefixes are asked for often, and a flood of others goes by once",
    ),
    "host_memory": Case(
        (*SMALL, *POISSON, "workload.rate=0.5", "workload.num_requests=200", "workload.num_groups=40",
         "workload.group_len=4000", "workload.zipf=0", *lengths("50-100", "5-10"),
         "keep=kv.dtype,executor.weights"),
        "host memory", "forty prefixes in turn, of which the device holds a part and the host all",
    ),
    "two_devices": Case(
        ("hardware=l40s", "model=qwen3_14b", "tracking=off", *POISSON, "workload.rate=0.8",
         "workload.num_requests=160", *lengths("800-1200", "150-250"), "devices=2", "fleet.replicas=1",
         "keep=kv.dtype,executor.weights,executor.memory_utilization"),
        "devices", "one device cannot keep up",
    ),
    "scattered_sessions": Case(
        ("hardware=l40s", "model=llama3_1_8b", "tracking=off", *POISSON, "workload.rate=1.2",
         "workload.num_requests=60", "workload.turns=5", "workload.think_s=5", *lengths("1500-2500", "50-80"),
         "fleet.replicas=4", "devices=4", "keep=kv.dtype,executor.weights"),
        "router", "turns of a conversation come to replicas that have not seen it",
    ),
    "static_batches": Case(
        (*DEVICE, *POISSON, "workload.rate=6", "workload.num_requests=160", *lengths("200-300", "20-400"),
         "scheduler=static", "scheduler.max_batch_size=16"),
        "batching", "a batch waits for its longest output",
    ),
    "short_behind_long": Case(
        (*DEVICE, *POISSON, "workload.rate=16", "workload.num_requests=240", "workload.prompt_len.min=50",
         "workload.prompt_len.max=30000", "workload.prompt_len.distribution=lognormal",
         "workload.prompt_len.median=1500", "workload.prompt_len.sigma=1.6", "workload.output_len.min=5",
         "workload.output_len.max=10", "keep=executor.weights,kv.dtype"),
        "order", "short prompts wait behind long ones",
    ),
    "nothing": Case(
        (*DEVICE, *POISSON, "workload.rate=1", "workload.num_requests=120", *lengths("200-400", "100-200"),
         "slo.ttft_ms=500", "slo.tpot_ms=30"),
        None, "one request a second, which the device serves within all limits",
    ),
}  # fmt: skip


def advice_on(case: Case, minutes: float = 1.0) -> Advice:
    """The advice on a case."""
    settings, others = read_settings(AdviseSettings, [*case.words, f"minutes={minutes}"])
    config, words, _ = compose_today(settings, words_of(settings, others))
    with tempfile.TemporaryDirectory() as folder:
        return Adviser(config, words, settings, Path(folder) / "simulations.jsonl").advise()


def first_kind(advice: Advice) -> str | None:
    """The kind of the first change; None: change nothing."""
    return advice.proposals[0].kind if advice.plan.settings and advice.proposals else None


def main() -> None:
    """Run all cases, or those named, and write results.json."""
    names, found, right = sys.argv[1:] or list(CASES), dict[str, object](), 0
    for name in names:
        case, start = CASES[name], time.process_time()
        advice = advice_on(case)
        kind, first = first_kind(advice), advice.proposals[0].text if advice.proposals else "change nothing"
        found[name] = {
            "best": case.best, "first": kind, "settings": first, "is_right": kind == case.best,
            "gain": advice.proposals[0].again.value if advice.proposals else None,
            "plan": list(advice.plan.settings), "answer": advice.sentences()[1],
        }  # fmt: skip
        right += kind == case.best
        seconds = time.process_time() - start
        word = "right" if kind == case.best else f"WRONG, {case.best} was expected"
        print(f"{name}: {kind} ({first}): {word}; {seconds:.0f} s", flush=True)
        for proposal in advice.proposals[:4]:
            print(f"    {proposal.again.value:+7.1f}  {proposal.text}")
    print(f"{right} of {len(found)} right")
    if len(found) == len(CASES):
        Path(__file__).with_name("results.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
