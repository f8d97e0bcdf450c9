"""What the traffic is, and how far today's settings are from what cannot be beaten."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvlab.config import RunConfig, WorkloadConfig
from kvlab.core import Request
from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.pools import POOLS
from kvlab.lab.advise.changes import TrafficFacts
from kvlab.lab.advise.simulations import Outcome
from kvlab.lab.prefix_replay.replay import BELADY, Task, replay_all
from kvlab.lab.prefix_replay.reuse import reuse_distances
from kvlab.lab.prefix_replay.traffic import read_traffic
from kvlab.workloads.describe import unknown_prompts
from kvlab.workloads.prefixes import prefix_tree
from kvlab.workloads.prompts import grown_lengths

_FINE = 16  # tokens of a block, vLLM's default
_NOTABLE = 0.01  # of prompt tokens: a difference of hit rates that is worth a simulation
_POLICIES_TRIED = 400_000  # blocks of visits up to which every policy is replayed; beyond lru and belady alone


@dataclass(frozen=True, slots=True)
class TrafficSummary:
    """All of the traffic. Rates are per second, lengths in tokens; arrivals are those of first turns alone."""

    requests: int
    conversations: int
    seconds: float
    per_s: float | None  # None: all at once
    burstiness: float | None  # deviation of the gaps between arrivals over their mean; 1: Poisson
    prompt: tuple[float, ...]  # p50, p99
    output: tuple[float, ...]
    unknown: str | None  # why it is not known what prompts have in common

    def sentence(self) -> str:
        """In words."""
        rate = "all at once" if self.per_s is None else f"{self.per_s:.3g} a second over {self.seconds:,.0f} s"
        text = f"{self.requests:,} requests, {rate}"
        if self.conversations < self.requests:
            text = f"{self.requests:,} requests in {self.conversations:,} conversations, which begin {rate}"
        if self.burstiness is not None:
            text += f" (gaps vary {self.burstiness:.2f} times their mean)"
        prompt, output = ("{:,.0f} ({:,.0f})".format(*lengths) for lengths in (self.prompt, self.output))
        return f"{text}; prompts of {prompt} tokens, outputs of {output}: p50 (p99)"


def summary(workload: WorkloadConfig, requests: Sequence[Request]) -> TrafficSummary:
    """What the traffic is."""
    arrivals = np.array([request.arrival_s for request in requests if request.follows is None])
    grown = grown_lengths(list(requests))
    outputs = [request.expected_tokens for request in requests]
    prompts = [grown[request.request_id] - request.expected_tokens for request in requests]
    count, seconds, gaps = len(arrivals), float(arrivals[-1] - arrivals[0]), np.diff(arrivals)
    per_s = (count - 1) / seconds if seconds else None
    varies = float(gaps.std() / gaps.mean()) if seconds and len(gaps) > 1 else None
    prompt, output = (tuple(np.percentile(lengths, (50, 99)).tolist()) for lengths in (prompts, outputs))
    unknown = unknown_prompts(workload)
    return TrafficSummary(len(requests), count, seconds, per_s, varies, prompt, output, unknown)


@dataclass(frozen=True, slots=True)
class Headroom:
    """What there is to gain at most. The ledger alone says which shares of prompt tokens are found, of requests one
    after the other in a pool of the size of all replicas' together, by policy and the optimum, and without a limit.
    `blocks_for` gives the blocks at which the least recently used finds half, nine tenths and all but a hundredth
    of that. `alone_s`: the mean time of a request that has the devices to itself.
    """

    blocks: int
    rates: Mapping[str, float]  # by policy, with belady
    ceiling: float  # with blocks of 16 tokens, where those find more
    blocks_for: Mapping[str, int]
    now: float = 0.0  # what is found, as served
    mean_s: float = 0.0
    alone_s: float = 0.0
    causes: Mapping[str, float] = field(default_factory=dict)  # shares of the time of all requests
    overload: str | None = None  # that today's settings do not keep up, in words

    @property
    def policies(self) -> dict[str, float]:
        """Rates that can be had."""
        return {name: rate for name, rate in self.rates.items() if name != BELADY}

    def facts(self, eviction: str, requests: Sequence[Request], today: Outcome) -> TrafficFacts:
        """What decides which changes make sense."""
        best = max(self.policies, key=self.policies.__getitem__, default="")
        own = self.policies.get(eviction)
        return TrafficFacts(
            shares=self.ceiling > _NOTABLE,
            misses=self.ceiling > self.now + _NOTABLE,
            preempts=today.metrics.get("requests/preemptions", 0.0) > 0,
            best_eviction=best if own is not None and self.policies[best] > own + _NOTABLE else None,
            salts=len({request.salt for request in requests if request.salt is not None}),
            pins=any(request.pin_tokens for request in requests),
            most_running=int(today.metrics.get("capacity/peak_running", 0)),
            asks_more=any(request.expected_tokens < request.sampling.max_tokens for request in requests),
        )


def replayed(config: RunConfig, requests: Sequence[Request], blocks: int, cores: int) -> Headroom:
    """Replay requests through the ledger with `blocks` of today's size, under every eviction policy and the
    optimum. One pass over reuse distances gives what any size finds with the least recently used.
    """
    pool = POOLS.get(config.kv.backend)
    if not pool.is_paged() or unknown_prompts(config.workload) is not None:
        return Headroom(blocks, {}, 0.0, {})
    traffic = read_traffic(requests, pool.block_size_for(config.kv, config.model.max_seq_len))
    found_at_most = traffic.hit_rate(traffic.found_at_most)
    ceiling = max(found_at_most, prefix_tree(requests, _FINE).most_hit_rate)
    if not traffic.found_at_most:
        return Headroom(blocks, {}, ceiling, {})
    size = max(blocks, traffic.longest)
    if size >= traffic.contents + 1:  # never full
        rates = dict.fromkeys((*EVICTION_POLICIES.names(), BELADY), found_at_most)
    else:
        is_large = sum(visit.blocks for visit in traffic.visits) > _POLICIES_TRIED
        names = [config.kv.eviction] if is_large else EVICTION_POLICIES.names()
        tasks = [Task(name, size) for name in (*names, BELADY)]
        found = {task.policy: blocks for task, blocks in replay_all(traffic, tasks, 1, cores=cores)}
        rates = {name: traffic.hit_rate(found[name]) for name in (*names, BELADY)}
    needed = reuse_distances(traffic)
    needed = np.sort(needed[needed >= 0] + 1)
    shares = {"50 %": 0.5, "90 %": 0.9, "99 %": 0.99} if len(needed) else {}
    return Headroom(size, rates, ceiling, {name: int(needed[int(at * len(needed))]) for name, at in shares.items()})
