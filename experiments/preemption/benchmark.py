"""What a pool that is too small costs, for each choice of who gives way.

    python -m experiments.preemption.benchmark [overrides of python -m src.run] [--rounds 3] [--shares 0.7 0.5 0.3]

First the workload runs in a pool in which all of it fits; the most blocks it had in use are what it needs. Then it
runs in shares of them. All requests have to complete, however often each is preempted.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

from experiments.runs import configure, measure, scheduled
from kvlab.config import PreemptionConfig, RunConfig
from kvlab.engine.scheduler.victims import VICTIMS
from kvlab.lab.machine import describe

_FIGURES = (
    "throughput/output_tokens_per_s",
    "requests/preemptions",
    "tokens/recomputed_share",
    "latency/ttft_ms_p99",
    "latency/e2el_ms_p99",
)


def sized(config: RunConfig, num_blocks: int) -> RunConfig:
    return dataclasses.replace(config, kv=dataclasses.replace(config.kv, num_blocks=num_blocks, memory=None))


def blocks_needed(config: RunConfig) -> int:
    """The most blocks in use at once where there are enough for every request."""
    plan, log, _ = measure(sized(config, _enough(config)))
    needed = max(step.pool.blocks_in_use for step in log.steps if step.pool is not None)
    longest = max(request.max_total_tokens for request in plan.requests)
    return max(needed, -(-longest // config.kv.block_size))


def _enough(config: RunConfig) -> int:
    """Blocks for `max_batch_size` of the longest sequences that are served, and the reserve."""
    per_sequence = -(-config.model.max_seq_len // config.kv.block_size)
    return int(1.3 * per_sequence * min(config.scheduler.max_batch_size, config.workload.num_requests))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", default=["workload=burst48", "workload.priorities=3"])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.7, 0.5, 0.3])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    config = configure(arguments.overrides)
    needed = blocks_needed(config)
    victims = VICTIMS.names()
    points = [(1.0, "last_admitted"), *((share, victim) for share in arguments.shares for victim in victims)]
    measured: dict[tuple[float, str], list[dict[str, float]]] = {point: [] for point in points}
    for _ in range(arguments.rounds):  # in turn, so that a drift of the machine strikes all alike
        for share, victim in points:
            point = sized(scheduled(config, preemption=PreemptionConfig(victim)), max(1, round(share * needed)))
            measured[share, victim].append(measure(point)[2])
    print(f"`{' '.join(arguments.overrides)}` needs {needed} blocks of {config.kv.block_size} tokens.")
    print(f"{describe('cpu')}; medians of {arguments.rounds}, {time.strftime('%Y-%m-%d')}\n")
    print(
        "| pool | victim | output tok/s | of the whole pool's | preemptions | tokens recomputed "
        "| first token p99, s | whole request p99, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    whole = 0.0
    for (share, victim), runs in measured.items():
        rate, preemptions, recomputed, ttft, e2el = (
            statistics.median(run[figure] for run in runs) for figure in _FIGURES
        )
        whole = whole or rate
        name = victim if preemptions else "any"
        print(
            f"| {share:.1f} | {name} | {rate:.0f} | {rate / whole:.2f} | {preemptions:.0f} | {recomputed:.1f} % "
            f"| {ttft / 1000:.1f} | {e2el / 1000:.1f} |"
        )


if __name__ == "__main__":
    main()
