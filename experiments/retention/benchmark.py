"""What quotas, pins and a time to live keep of a prefix cache: three kinds of traffic, with and without each.

    python -m experiments.retention.benchmark [--figure FILE] [--map FILE]

The device is simulated, so that the figures are the same on every machine; prefix cache, eviction and scheduler are
the engine's own.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.runs import SIMULATED_L4, configure
from kvlab.core import Request, RequestRecord, SamplingParams
from kvlab.engine.build import build_engine
from kvlab.kv.journal import BlockJournal
from kvlab.lab.figures.pool_map import tenant_map_figure
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.metrics import run_metrics
from kvlab.lab.results.records import make_run
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import plan_run

DEVICE = (*SIMULATED_L4, "workload=burst16", "kv.num_blocks=2048")  # 32,768 tokens
VOCABULARY = 100_000
QUOTAS = (None, 0.5, 0.25, 0.1)
SHARES = (0.0, 0.05, 0.1)
TTLS = (5.0, 15.0, 30.0, 60.0, 120.0, 300.0, None)
POLICIES = ("lru", "lfu", "s3_fifo")


class Result(NamedTuple):
    """A run's log and metrics."""

    log: RunLog
    metrics: dict[str, float]

    def of(self, prefix: str) -> list[RequestRecord]:
        """The records of the requests whose names begin so."""
        return [record for record in self.log.records if record.request_id.startswith(prefix)]

    def hit_rate(self, prefix: str) -> float:
        """The share of their prompt tokens that was found, in %."""
        records = self.of(prefix)
        return 100 * sum(each.cached_tokens for each in records) / sum(each.prompt_tokens for each in records)

    def ttft_ms(self, prefix: str) -> float:
        """Their median time to the first token."""
        return float(np.median([each.ttft_ms for each in self.of(prefix) if each.ttft_ms is not None]))


class Source:
    """Makes requests of random tokens."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.requests: list[Request] = []

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.integers(0, VOCABULARY, count).tolist())

    def times(self, rate: float, until_s: float) -> Sequence[float]:
        """Poisson arrivals."""
        gaps = self.random.exponential(1 / rate, int(2 * rate * until_s) + 10)
        times: list[float] = np.cumsum(gaps).tolist()
        return [time for time in times if time < until_s]

    def add(self, name: str, prompt: tuple[int, ...], outputs: int, arrival_s: float, **more: Any) -> None:
        sampling = SamplingParams(outputs, ignore_eos=True, seed=0)
        name = f"{name}-{len(self.requests)}"
        self.requests.append(Request(name, prompt, sampling, arrival_s, **more))


def two_tenants() -> list[Request]:
    """Ten minutes. "calm" asks of one of 8 documents of 1,024 tokens, every 4 seconds; "flood" sends prompts that
    never come again, 1,024 to 3,072 tokens, one every 1.25 seconds.
    """
    source = Source(1)
    documents = [source.tokens(1024) for _ in range(8)]
    for arrival in source.times(0.25, 600):
        source.add("calm", documents[int(source.random.integers(8))] + source.tokens(32), 64, arrival, salt="calm")
    for arrival in source.times(0.8, 600):
        length = int(source.random.integers(1024, 3072))
        source.add("flood", source.tokens(length), 64, arrival, salt="flood")
    return sorted(source.requests, key=lambda request: request.arrival_s)


def rare_prompt() -> list[Request]:
    """Ten minutes. "rare" begins with the same 1,536 tokens, once a minute; the rest never comes again."""
    source = Source(2)
    system = source.tokens(1536)
    for arrival in source.times(1 / 60, 600):
        source.add("rare", system + source.tokens(64), 64, arrival, pin_tokens=len(system))
    for arrival in source.times(0.8, 600):
        source.add("other", source.tokens(int(source.random.integers(1024, 3072))), 64, arrival)
    return sorted(source.requests, key=lambda request: request.arrival_s)


def conversations() -> list[Request]:
    """60 conversations of 5 turns in ten minutes; the next question comes after 30 seconds in the median."""
    source = Source(3)
    for arrival in source.times(0.1, 600):
        source.add("turn", source.tokens(256), 96, arrival)
        for _ in range(4):
            wait = min(float(source.random.lognormal(np.log(30), 1.0)), 600)
            source.add("turn", source.tokens(64), 96, wait, follows=source.requests[-1].request_id)
    first = [request for request in source.requests if request.follows is None]
    return sorted(first, key=lambda request: request.arrival_s) + [r for r in source.requests if r.follows]


def serve(requests: list[Request], **kv: Any) -> Result:
    """The same requests with other settings of the cache."""
    config = configure([*DEVICE])
    config = dataclasses.replace(config, kv=dataclasses.replace(config.kv, **kv))
    plan, journal = plan_run(config), BlockJournal()
    engine = build_engine(plan, journal=journal)
    log = drive(engine, requests)
    if log.completed != len(requests):
        raise RuntimeError(f"{log.completed} of {len(requests)} requests completed")
    if findings := engine.audit():
        raise RuntimeError("; ".join(map(str, findings)))
    log.blocks = journal.columns(record.key for record in log.records)
    return Result(log, run_metrics(log, plan.pool))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def said(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def quotas() -> dict[tuple[str, float | None], Result]:
    requests = two_tenants()
    settings = [(policy, quota) for policy in POLICIES for quota in QUOTAS]
    return {(policy, quota): serve(requests, eviction=policy, quota=quota) for policy, quota in settings}


def pins() -> dict[float, Result]:
    requests = rare_prompt()
    return {share: serve(requests, pinned_share=share) for share in SHARES}


def ttls() -> dict[float | None, Result]:
    requests = conversations()
    return {ttl: serve(requests, ttl_s=ttl) for ttl in TTLS}


def draw(by_quota: dict[tuple[str, float | None], Result], by_ttl: dict[float | None, Result], path: Path) -> None:
    """Hit rates of both tenants over the quota, and of conversations over the time to live."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for policy, colour in zip(POLICIES, ("#0072B2", "#E69F00", "#009E73"), strict=True):
        rates = [by_quota[policy, quota].hit_rate("calm") for quota in QUOTAS]
        left.plot(range(len(QUOTAS)), rates, marker="o", color=colour, label=policy)
    left.set_xticks(range(len(QUOTAS)), [said(quota) for quota in QUOTAS])
    left.set(
        xlabel="kv.quota",
        ylabel="prompt tokens found, %",
        title="What one tenant finds while another floods",
        ylim=(-3, 100),
    )
    left.legend(fontsize=8)
    rates = [result.hit_rate("turn") for result in by_ttl.values()]
    right.plot(range(len(TTLS)), rates, marker="o", color="#0072B2", label="prompt tokens found, %")
    cached = [mean_cached(result) for result in by_ttl.values()]
    right.plot(range(len(TTLS)), cached, marker="s", color="#8A8A8A", label="mean of blocks cached, % of the pool")
    right.set_xticks(range(len(TTLS)), [said(ttl) for ttl in TTLS])
    right.set(xlabel="kv.ttl_s", title="Conversations, a question every 30 s", ylim=(-3, 100))
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=100)


def draw_map(path: Path) -> None:
    """The pool in the first two minutes of the two tenants, where "calm" pins its documents."""
    requests = [
        dataclasses.replace(request, pin_tokens=1024 if request.salt == "calm" else 0)
        for request in two_tenants()
        if request.arrival_s < 120
    ]
    result = serve(requests, quota=0.5, pinned_share=0.25)
    figure = tenant_map_figure(make_run(path.parent, {"config": {}}, result.log))
    if figure is not None:
        figure.savefig(path)


def mean_cached(result: Result) -> float:
    """Cached blocks in % of the pool, the mean over the run's time in steps."""
    steps = result.log.steps
    share = steps.column("pool.blocks_cached") / steps.column("pool.blocks_total")
    return 100 * float(np.average(share, weights=steps.seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--map", type=Path)
    arguments = parser.parse_args()
    if arguments.map:
        draw_map(arguments.map)
    by_quota, by_share, by_ttl = quotas(), pins(), ttls()
    rows = [
        [
            policy,
            said(quota),
            *(f"{result.hit_rate(name):.1f} %" for name in ("calm", "flood")),
            *(f"{result.ttft_ms(name):.0f}" for name in ("calm", "flood")),
            f"{result.metrics.get('kv/quota_evictions', 0):.0f} of {result.metrics['kv/evicted_blocks']:.0f}",
        ]
        for (policy, quota), result in by_quota.items()
    ]
    head = [
        "policy",
        "kv.quota",
        "calm finds",
        "flood finds",
        "calm, first token p50, ms",
        "flood",
        "for the quota",
    ]
    print(f"## Two tenants\n\n{table(head, rows)}\n")
    rows = [
        [
            f"{share:g}",
            f"{result.hit_rate('rare'):.1f} %",
            f"{result.ttft_ms('rare'):.0f}",
            f"{result.ttft_ms('other'):.0f}",
            f"{result.metrics.get('kv/pinned_blocks_peak', 0):.0f}",
            f"{result.metrics.get('kv/pins_refused', 0):.0f}",
        ]
        for share, result in by_share.items()
    ]
    head = ["kv.pinned_share", "rare finds", "rare, first token p50, ms", "others", "pinned blocks", "refused"]
    print(f"## A prompt that is used once a minute\n\n{table(head, rows)}\n")
    rows = [
        [
            said(ttl),
            f"{result.hit_rate('turn'):.1f} %",
            f"{mean_cached(result):.0f} %",
            f"{result.metrics.get('kv/expired_blocks', 0):.0f}",
            f"{result.metrics['kv/evicted_blocks']:.0f}",
        ]
        for ttl, result in by_ttl.items()
    ]
    head = ["kv.ttl_s", "turns find", "of the pool cached", "expired blocks", "evicted blocks"]
    print(f"## Conversations\n\n{table(head, rows)}\n")
    if arguments.figure:
        draw(by_quota, by_ttl, arguments.figure)


if __name__ == "__main__":
    main()
