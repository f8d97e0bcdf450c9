"""The figures of several replicas: what each did, and all together at one moment."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.table import Table

from kvlab.core import Request, RequestRecord
from kvlab.core.step_log import StepLog
from kvlab.fleet.dispatcher import Routed
from kvlab.fleet.holdings import Duplicates, Holdings
from kvlab.fleet.transfer import Transfer
from kvlab.kv.sizing import PoolSize
from kvlab.lab.results.log import FleetLog, RunLog
from kvlab.lab.results.requests import latencies_ms
from kvlab.lab.results.tables import new_table
from kvlab.workloads.prefixes import prefix_tree

#: Metrics that are the most of what pools have at one moment, and where a step has it.
_PEAKS = {
    "shared_blocks_peak": "shared_blocks",
    "pinned_blocks_peak": "blocks_pinned",
    "host_blocks_peak": "host_blocks",
    "disk_blocks_peak": "disk_blocks",
}


class ReplicaFigures(NamedTuple):
    """What one replica did."""

    requests: int  # that it was given
    prompt_tokens: int  # of those that no other computed for it
    hit_tokens: int  # of these, served from its prefix cache
    pulled_tokens: int  # of prompts that another computed for it
    output_tokens: int
    peak_running: int
    peak_waiting: int
    busy: float  # share of the time from the first step's start to the last step's end, 0 to 1
    ttft_ms: float | None  # median


def replica_figures(
    records: Sequence[RequestRecord], steps: StepLog, replicas: int, fleet: FleetLog | None = None
) -> list[ReplicaFigures]:
    """The figures of each replica, in order. With what the `fleet` did, a prompt counts where it was computed, and
    not where its K and V were pulled.
    """
    pulled, routed = ({}, []) if fleet is None else (fleet.pulled_tokens, fleet.routed)
    figures, apart = [], {chosen.request_id for chosen in routed if chosen.stage == "prefill"}
    starts, ends, taken_by = steps.column("start_s"), steps.column("end_s"), steps.column("replica")
    running, waiting, seconds = steps.column("running"), steps.column("waiting"), ends - starts
    counted = [steps.column(f"counters.{name}") for name in ("prompt_tokens", "hit_tokens")]
    whole = float(ends.max() - starts.min()) if len(steps) else 0.0
    records_of = defaultdict[int, list[RequestRecord]](list)
    for record in records:
        records_of[record.replica].append(record)
    for replica in range(replicas):
        own, taken = records_of[replica], np.flatnonzero(taken_by == replica)
        prompts, hits = (int(column[taken].sum()) for column in counted)
        if replica in pulled:  # whose pool counts as found what it pulls
            alone = [record for record in own if not record.sample and record.request_id not in apart]
            prompts, hits = (sum(map(attrgetter(name), alone)) for name in ("prompt_tokens", "cached_tokens"))
        ttft = latencies_ms(own)["ttft"]
        figures.append(
            ReplicaFigures(
                requests=sum(not record.sample for record in own),
                prompt_tokens=prompts,
                hit_tokens=hits,
                pulled_tokens=pulled.get(replica, 0),
                output_tokens=sum(len(record.token_times_s) for record in own),
                peak_running=int(running[taken].max(initial=0)),
                peak_waiting=int(waiting[taken].max(initial=0)),
                busy=float(seconds[taken].sum()) / whole if whole else 0.0,
                ttft_ms=float(np.median(ttft)) if len(ttft) else None,
            )
        )
    return figures


def fleet_metrics(
    log: RunLog, fleet: FleetLog, pools: Sequence[PoolSize], requests: Sequence[Request]
) -> dict[str, float]:
    """The figures of all replicas together that no sum over steps gives. `pools`: of each replica."""
    size = pools[0].block_size
    metrics = _together(log.records, log.steps, len(pools), fleet.gone) | {
        "capacity/kv_bytes": sum(pool.num_bytes for pool in pools),
        "capacity/token_slots": sum(pool.token_slots for pool in pools),
    }
    if fleet.transfers:
        milliseconds = [1000 * (transfer.end_s - transfer.ready_s) for transfer in fleet.transfers]
        p50, p99 = np.percentile(milliseconds, [50, 99]).tolist()
        metrics |= {"fleet/transfer_ms_p50": p50, "fleet/transfer_ms_p99": p99}
        metrics["fleet/transfers"] = len(milliseconds)
        metrics["fleet/transfer_bytes"] = sum(transfer.num_bytes for transfer in fleet.transfers)
    if fleet.retried is not None:
        metrics |= {"fleet/retried": fleet.retried, "fleet/lost_tokens": fleet.lost_tokens}
    if fleet.store is not None:
        metrics["fleet/store_written_blocks"] = fleet.store.stored
        metrics["fleet/store_loaded_blocks"] = fleet.store.loaded
        metrics["fleet/store_hit_tokens"] = fleet.store.hits * size
    if fleet.pulls is not None:
        metrics["fleet/pulls"] = len(fleet.pulls)
        metrics["fleet/pulled_bytes"] = sum(pull.num_bytes for pull in fleet.pulls)
        metrics["fleet/pulled_hit_tokens"] = fleet.pulled_hits * size
    if fleet.holdings is not None:
        metrics |= _duplicates(fleet.holdings.duplicates)
        metrics["fleet/hit_rate_ceiling"] = prefix_tree(requests, size).most_hit_rate
    if fleet.replica_s is not None:
        metrics["fleet/replicas_mean"] = fleet.replica_s / max(log.duration_s, 1e-9)
        metrics["fleet/started"] = sum(scaled.event == "start" for scaled in fleet.scaled)
    return metrics


def _together(
    records: Sequence[RequestRecord], steps: StepLog, replicas: int, gone: Sequence[tuple[float, int]]
) -> dict[str, float]:
    """How even the work was, what prompts found, and how many sequences and blocks there were at one moment."""
    every = replica_figures(records, steps, replicas)
    work = [one.prompt_tokens - one.hit_tokens + one.output_tokens for one in every]
    metrics = {
        "fleet/replicas": float(replicas),
        "fleet/imbalance": max(work) / (sum(work) / replicas) if sum(work) else 1.0,
        "fleet/busy_least": 100 * min(one.busy for one in every),
    }
    firsts = [record for record in records if not record.sample]
    if prompts := sum(record.prompt_tokens for record in firsts if record.scheduled_s is not None):
        hits = sum(record.cached_tokens for record in firsts)
        metrics |= {"kv/prefix_hit_tokens": hits, "kv/prefix_hit_rate": hits / prompts}
    if len(steps):
        starts, seconds, running = steps.column("start_s"), steps.seconds, steps.column("running")
        whole = float((starts + seconds).max() - starts.min())
        metrics["capacity/peak_running"] = float(of_all(running, steps, gone).max())
        for name in _PEAKS:
            if peak := int(of_all(steps.column(f"pool.{_PEAKS[name]}"), steps, gone).max()):
                metrics[f"kv/{name}"] = peak
        if whole > 0:
            metrics["capacity/mean_running"] = float((running * seconds).sum()) / whole
    return metrics


def of_all(values: NDArray[Any], steps: StepLog, deaths: Sequence[tuple[float, int]] = ()) -> NDArray[np.float64]:
    """The sum over all replicas of something that their steps have, as each step begins: of a replica that of its
    last step, and none from its death or stop on, as what it loses is elsewhere, or nowhere.
    """
    dead_s, dead = zip(*deaths, strict=True) if deaths else ((), ())
    order = np.argsort(np.append(dead_s, steps.column("start_s")), kind="stable")
    own = np.append(dead, steps.column("replica"))[order]
    change = np.append(np.zeros(len(deaths)), values)[order]
    for replica in np.unique(own):
        change[own == replica] = np.diff(change[own == replica], prepend=0)
    sums = np.empty(len(order))
    sums[order] = np.cumsum(change)
    return sums[len(deaths) :]


def _duplicates(duplicates: Duplicates) -> dict[str, float]:
    """Tokens that several replicas hold: over the time so far, and the most."""
    seconds, held_s, peak_held = duplicates.at_s, duplicates.held_s, duplicates.peak_held
    return {
        "fleet/duplicate_tokens_mean": duplicates.duplicate_s / seconds if seconds else 0.0,
        "fleet/duplicate_tokens_peak": duplicates.peak,
        "fleet/duplicate_share_mean": 100 * duplicates.duplicate_s / held_s if held_s else 0.0,
        "fleet/duplicate_share_peak": 100 * duplicates.peak / peak_held if peak_held else 0.0,
    }


def pulled_tokens(pulls: Sequence[Transfer]) -> Counter[str]:
    """Tokens that each request pulled."""
    tokens = Counter[str]()
    for pull in pulls:
        tokens[pull.request_id] += pull.tokens
    return tokens


def prefixes_table(holdings: Holdings) -> pa.Table:
    """Where the hottest prefixes are, as the table of prefixes.parquet: from `at_s` on a replica has so many tokens
    of a prefix, which has `of_tokens` and is that of so many `requests`.
    """
    hot, history = holdings.hot, holdings.history
    return pa.table(
        {
            "at_s": pa.array([held.at_s for held in history], pa.float64()),
            "prefix": pa.array([held.prefix for held in history], pa.int64()),
            "replica": pa.array([held.replica for held in history], pa.int64()),
            "tokens": pa.array([held.blocks * holdings.pools[0].block_size for held in history], pa.int64()),
            "of_tokens": pa.array([hot[held.prefix].tokens for held in history], pa.int64()),
            "requests": pa.array([hot[held.prefix].requests for held in history], pa.int64()),
        }
    )


def replica_table(every: Sequence[ReplicaFigures], first: int = 0) -> Table:
    """A row for each replica, numbered from `first` on: requests that ended there, none where it only prefills,
    tokens of prompts, each where it was computed, the share found in the cache, where any pulled some those that it
    pulled, output tokens, most sequences that ran and waited, time in steps, and the median time to first token.
    """
    pulls = ["pulled"] if any(figures.pulled_tokens for figures in every) else []
    names = ("ended", "prompts", "found", *pulls, "outputs", "most run", "most wait", "busy", "ttft p50")
    table = new_table("replica", *names)
    for number, figures in enumerate(every, first):
        rate = f"{100 * figures.hit_tokens / figures.prompt_tokens:.1f} %" if figures.prompt_tokens else "-"
        ttft = "-" if figures.ttft_ms is None else f"{figures.ttft_ms:,.0f} ms"
        table.add_row(
            str(number),
            f"{figures.requests:,}",
            f"{figures.prompt_tokens:,}",
            rate,
            *(f"{figures.pulled_tokens:,}" for _ in pulls),
            f"{figures.output_tokens:,}",
            f"{figures.peak_running:,}",
            f"{figures.peak_waiting:,}",
            f"{100 * figures.busy:.0f} %",
            ttft,
        )
    return table


def routes_table(routed: Sequence[Routed]) -> pa.Table:
    """What the router chose, in order, as the table of routes.parquet: `scores` has one for each replica that it
    asked, of those it was given (`among`), and is empty where it scores none.
    """
    return pa.table(
        {
            "request_id": pa.array([chosen.request_id for chosen in routed], pa.string()),
            "at_s": pa.array([chosen.at_s for chosen in routed], pa.float64()),
            "replica": pa.array([chosen.choice.replica for chosen in routed], pa.int64()),
            "among": pa.array([chosen.among for chosen in routed], pa.list_(pa.int64())),
            "stage": pa.array([chosen.stage for chosen in routed], pa.string()),
            "scores": pa.array([chosen.choice.scores for chosen in routed], pa.list_(pa.float64())),
        }
    )
