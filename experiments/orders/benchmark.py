"""Every scheduling order on the same traffic: who gets the first token when, who is done when, who waits longest.

    python -m experiments.orders.benchmark [overrides of kvlab run] [--requests 1000] [--figure FILE]

The device is simulated, so that the figures are the same on every machine. Requests come about as fast as they can
be served, which is when a queue forms and an order decides anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.runs import SIMULATED_L4, configure, scheduled
from kvlab.core import Request, RequestRecord
from kvlab.engine.build import build_engine
from kvlab.engine.scheduler.orders import ORDERS
from kvlab.lab.results.metrics import run_metrics
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import plan_run

DEVICE = (*SIMULATED_L4, "kv.num_blocks=2177")
SETTINGS = ("scheduler.max_batch_size=64", "scheduler.max_batched_tokens=1024", "workload.priorities=3")
SHARED = ("workload.num_groups=32", "workload.group_len=512")  # 32 system prompts, drawn by Zipf's law
TRAFFIC = {
    "mixed": (
        "workload=mixed32",
        "workload.arrival=poisson",
        "workload.rate=0.9",
        "workload.prompt_len={min: 64, max: 2048}",
        "workload.output_len={min: 32, max: 512}",
    ),
    "heavy-tailed": (
        "workload=heavy_tail",
        "workload.rate=1.1",
        "workload.prompt_len={min: 16, max: 8192, distribution: lognormal, median: 400, sigma: 1.3}",
        "workload.output_len={min: 1, max: 2048, distribution: lognormal, median: 120, sigma: 1.3}",
    ),
}
CLASSES = ("short", "medium", "long")  # half of the requests, the next 40 %, the longest 10 %
PARTS = (50, 90)  # percentiles between the classes
LONG_WAIT_S = 60.0
AGING = ("shortest_first", "priority", "longest_prefix")

Value = Callable[[RequestRecord], float | None]


def queue_s(record: RequestRecord) -> float | None:
    """Seconds to the first admission."""
    return None if record.queue_ms is None else record.queue_ms / 1000


def ttft_s(record: RequestRecord) -> float | None:
    """Seconds to the first token."""
    return None if record.ttft_ms is None else record.ttft_ms / 1000


def completion_s(record: RequestRecord) -> float | None:
    """Seconds to the last token."""
    return None if record.e2el_ms is None else record.e2el_ms / 1000


def prompt_tokens(request: Request) -> int:
    return len(request.prompt_token_ids)


def output_tokens(request: Request) -> int:
    return request.sampling.max_tokens


def total_tokens(request: Request) -> int:
    return request.max_total_tokens


class Result(NamedTuple):
    """An order's records by the requests' names, and the metrics of its run."""

    records: dict[str, RequestRecord]
    metrics: dict[str, float]

    def percentile(self, value: Value, requests: Iterable[Request], percent: float) -> float:
        """Of a time over some requests."""
        times = [value(self.records[request.request_id]) for request in requests]
        return float(np.percentile([time for time in times if time is not None], percent))


class Traffic(NamedTuple):
    """The requests, and what each order did with them."""

    name: str
    requests: list[Request]
    results: dict[str, Result]

    def classes(self, length: Callable[[Request], int]) -> list[list[Request]]:
        """The requests that are short, medium and long by prompt, output or both."""
        edges = np.percentile([length(request) for request in self.requests], PARTS)
        parts = np.searchsorted(edges, [length(request) for request in self.requests])
        found: list[list[Request]] = [[] for _ in CLASSES]
        for request, part in zip(self.requests, parts.tolist(), strict=True):
            found[part].append(request)
        return found


def variants() -> dict[str, dict[str, Any]]:
    """Settings of the scheduler by label: each order, and those that age once more without."""
    names = sorted(ORDERS.names(), key=lambda name: name != "fcfs")
    found: dict[str, dict[str, Any]] = {name: {"order": name} for name in names}
    return found | {f"{name}, no aging": {"order": name, "aging_s": None} for name in AGING}


def with_deadlines(requests: Sequence[Request]) -> list[Request]:
    """The longer the answer, the later it has to be complete: 10 s and 0.1 s for each token of it."""
    return [replace(request, deadline_s=10 + 0.1 * request.sampling.max_tokens) for request in requests]


def serve(name: str, overrides: Sequence[str]) -> Traffic:
    """The same requests under each order."""
    config = configure([*DEVICE, *SETTINGS, *SHARED, *TRAFFIC[name], *overrides])
    requests = with_deadlines(plan_run(config).requests)
    results: dict[str, Result] = {}
    for label, settings in variants().items():
        plan = plan_run(scheduled(config, **settings))
        log = drive(build_engine(plan), requests)
        if log.completed != len(requests):
            raise RuntimeError(f"{label}: {log.completed} of {len(requests)} requests completed")
        results[label] = Result({record.request_id: record for record in log.records}, run_metrics(log, plan.pool))
    return Traffic(name, requests, results)


def speed_table(traffic: Traffic) -> str:
    """Output rate, and typical latencies of each class, as Markdown."""
    prompts, outputs = traffic.classes(prompt_tokens), traffic.classes(output_tokens)
    lines = _heading(
        ["order", "output tok/s", "prefix hits", "preemptions", "deadlines met"]
        + [f"first token, {each} prompts" for each in CLASSES]
        + [f"complete, {each} outputs" for each in CLASSES]
    )
    for label, result in traffic.results.items():
        metrics = result.metrics
        times = [completion_s(result.records[r.request_id]) or 0.0 for r in traffic.requests]
        met = np.mean([time <= (r.deadline_s or 0.0) for time, r in zip(times, traffic.requests, strict=True)])
        cells = [
            label,
            f"{metrics['throughput/output_tokens_per_s']:.0f}",
            f"{100 * metrics['kv/prefix_hit_rate']:.0f} %",
            f"{metrics['requests/preemptions']:.0f}",
            f"{100 * met:.0f} %",
        ]
        cells += [f"{result.percentile(ttft_s, each, 50):.1f}" for each in prompts]
        cells += [f"{result.percentile(completion_s, each, 50):.1f}" for each in outputs]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def wait_table(traffic: Traffic) -> str:
    """p99 and maximum of the time in the queue, by class, and how many waited long, as Markdown."""
    parts = [(length, traffic.classes(function)) for length, function in LENGTHS.items()]
    lines = _heading(
        ["order", f"over {LONG_WAIT_S:.0f} s", "all"]
        + [f"{each} {length}" for length, _ in parts for each in CLASSES]
    )
    for label, result in traffic.results.items():
        long = sum((queue_s(record) or 0.0) > LONG_WAIT_S for record in result.records.values())
        groups = [traffic.requests, *(each for _, classes in parts for each in classes)]
        waits = [
            f"{result.percentile(queue_s, each, 99):.0f} / {result.percentile(queue_s, each, 100):.0f}"
            for each in groups
        ]
        lines.append(f"| {label} | {100 * long / len(result.records):.1f} % | {' | '.join(waits)} |")
    return "\n".join(lines)


def priority_table(traffic: Traffic) -> str:
    """Time to the first token of each priority level, as Markdown."""
    levels = sorted({request.priority for request in traffic.requests})
    lines = _heading(["order", *(f"priority {level}" for level in levels)])
    for label in ("fcfs", "priority", "priority, no aging"):
        result, cells = traffic.results[label], []
        for level in levels:
            mine = [request for request in traffic.requests if request.priority == level]
            cells.append(" / ".join(f"{result.percentile(ttft_s, mine, percent):.1f}" for percent in (50, 99)))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


LENGTHS: dict[str, Callable[[Request], int]] = {"prompts": prompt_tokens, "outputs": output_tokens}


def _heading(columns: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def draw(found: Sequence[Traffic], path: Path) -> None:
    """Time in the queue of each class under each order: a dot at the median, a line to p99, a tick at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(12, 5.6), sharey=True, squeeze=False)
    for axis, traffic in zip(axes[0], found, strict=True):
        labels = list(traffic.results)
        for part, (name, colour) in enumerate(zip(CLASSES, ("#0072B2", "#E69F00", "#D55E00"), strict=True)):
            mine = traffic.classes(total_tokens)[part]
            for row, label in enumerate(labels):
                middle, late, last = (
                    max(0.1, traffic.results[label].percentile(queue_s, mine, percent)) for percent in (50, 99, 100)
                )
                y = row + 0.26 * (part - 1)
                axis.plot([middle, late], [y, y], color=colour, linewidth=2)
                axis.plot(middle, y, "o", color=colour, markersize=5, label=name if not row else None)
                axis.plot(last, y, "|", color=colour, markersize=9)
        axis.set(
            xscale="log", xlabel="time in the queue, s (0.1 stands for less, too)", title=f"{traffic.name} traffic"
        )
        axis.set_yticks(range(len(labels)), labels)
        axis.grid(axis="x", alpha=0.3)
    axes[0][0].invert_yaxis()
    axes[0][-1].legend(title="prompt and output", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=100, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    overrides = [f"workload.num_requests={arguments.requests}", *arguments.overrides]
    found = [serve(name, overrides) for name in TRAFFIC]
    for traffic in found:
        sizes = {
            name: np.percentile([length(r) for r in traffic.requests], [50, 90, 100])
            for name, length in LENGTHS.items()
        }
        print(f"## {traffic.name}: {len(traffic.requests)} requests")
        for name, edges in sizes.items():
            print(
                f"{name}: short up to {edges[0]:.0f} tokens, medium up to {edges[1]:.0f}, long up to {edges[2]:.0f}"
            )
        print(f"\nMedians in seconds:\n\n{speed_table(traffic)}")
        print(f"\nSeconds in the queue, p99 / longest:\n\n{wait_table(traffic)}")
        print(f"\nSeconds to the first token, p50 / p99:\n\n{priority_table(traffic)}\n")
    if arguments.figure:
        draw(found, arguments.figure)


if __name__ == "__main__":
    main()
