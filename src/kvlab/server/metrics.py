"""Prometheus metrics, under vLLM's names where they mean the same, so that its dashboards work; else `kvlab:`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvlab.core import FinishReason, Request, RequestRecord, Sequence, StepRecord
from kvlab.engine.clock import PacedClock
from kvlab.server.blocks import BlockTimes, Durations
from kvlab.server.live import History

if TYPE_CHECKING:
    from kvlab.server.kv_events import KVEventPublisher

# Upper ends of the histograms' buckets: vLLM's (vllm/v1/metrics/buckets.py), whose rules and alerts name them, and
# shorter times of a request and between tokens.
_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
_GAPS = (
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_LENGTHS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))  # tokens of requests
_SAMPLES = (1, 2, 5, 10, 20)
_LABELS = ["model_name", "engine"]
ENGINE = "0"  # as vLLM numbers its engines; there is one
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Counters by name, with the field of StepRecord, or of its PoolCounters, that they sum up.
_OF_STEPS = (
    ("vllm:generation_tokens", "output_tokens", "Output tokens."),
    ("vllm:num_preemptions", "preempted", "Preemptions."),
    ("vllm:spec_decode_num_draft_tokens", "proposed_tokens", "Tokens that speculation proposed."),
    ("vllm:spec_decode_num_accepted_tokens", "accepted_tokens", "Proposed tokens that the model picked itself."),
)
_OF_POOL = (
    ("kvlab:kv_blocks_allocated", "blocks_allocated", "Blocks handed out."),
    ("kvlab:kv_blocks_freed", "blocks_freed", "Blocks given back."),
    ("kvlab:kv_evictions", "evictions", "Times that memory was taken from cached content."),
    ("kvlab:kv_evicted_blocks", "evicted_blocks", "Cached blocks that were evicted."),
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens of sequences that were admitted."),
    ("vllm:prefix_cache_queries", "prompt_tokens", "Prompt tokens that were looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "hit_tokens", "Prompt tokens that were found in it."),
    ("vllm:prompt_tokens_cached", "hit_tokens", "Prompt tokens that were cached, in the pool or behind it."),
)
_REASONS = {FinishReason.ABORTED: "abort", FinishReason.FAILED: "error"}  # whose names are vLLM's
_LATE_SHARE = 0.05  # of the time of steps, from which on a simulated device is not kept up with
_JUDGED_S = 0.25  # of this machine, after which that is said
_log = logging.getLogger(__name__)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Families(Collector):
    """Metrics that are made when they are asked for."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()


class ServerMetrics:
    """Counts of one server. `step` and `finish` are called by the thread that steps, `accept` and `text` by any."""

    def __init__(self, model: str) -> None:
        self._registry = registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, _LABELS, registry=registry).labels(model, ENGINE)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, _LABELS, registry=registry).labels(model, ENGINE)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=registry).labels(
                model, ENGINE
            )

        self.history = History()
        self._pace: PacedClock | None = None
        self._said_late = False
        self._model = model
        self._running = gauge("vllm:num_requests_running", "Sequences that hold memory.")
        self._waiting = gauge("vllm:num_requests_waiting", "Sequences in the waiting queue.")
        self._usage = gauge("vllm:kv_cache_usage_perc", "Blocks in use over blocks in the pool, 0 to 1.")
        self._fragmentation = gauge(
            "kvlab:kv_fragmentation_perc", "Token slots of blocks in use that hold no token, 0 to 1."
        )
        self._cached = gauge("kvlab:kv_cached_blocks", "Free blocks with content that can be found.")
        self._of_steps = [(field, counter(name, text)) for name, field, text in _OF_STEPS]
        self._of_pool = [(field, counter(name, text)) for name, field, text in _OF_POOL]
        text = "Tokens that were loaded from memory behind the pool."
        self._loaded = counter("vllm:external_prefix_cache_hits", text)
        self._success = Counter(
            "vllm:request_success", "Requests that ended.", [*_LABELS, "finished_reason"], registry=registry
        )
        for reason in FinishReason:  # from 0 on: Prometheus counts no growth to a value that it sees first
            self._ended(reason)
        text = "Requests that a full queue refused."
        refused = Counter("vllm:admission_rejections", text, [*_LABELS, "reason"], registry=registry)
        self._refused = refused.labels(model, ENGINE, "max_num_queued_reqs")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST)
        self._gaps = Durations(np.array(_GAPS))
        text = "Between one token and the next."
        family = partial(self._gaps.family, "inter_token_latency_seconds", text, model)
        registry.register(_Families(lambda: [family()]))
        self._seen: dict[tuple[str, int], int] = {}  # tokens of running samples whose times were counted
        self._tpot = histogram("request_time_per_output_token_seconds", "Of a sample, its mean gap.", _GAPS)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first admission.")
        self._prefill = histogram("request_prefill_time_seconds", "From admission to the first token.")
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.")
        self._inference = histogram("request_inference_time_seconds", "From admission to the last token.")
        self._preemptions = histogram("request_num_preemptions", "Preemptions of a sample.", _PREEMPTIONS)
        text = "Prompt tokens of a sample that were computed, not cached."
        self._computed = histogram("request_prefill_kv_computed_tokens", text, _LENGTHS)
        self._prompt_lengths = histogram("request_prompt_tokens", "Prompt tokens of a sample.", _LENGTHS)
        self._output_lengths = histogram("request_generation_tokens", "Output tokens of a sample.", _LENGTHS)
        self._most_tokens = histogram("request_params_max_tokens", "max_tokens of a request.", _LENGTHS)
        self._samples = histogram("request_params_n", "Samples of a request.", _SAMPLES)
        self._tokens = histogram("iteration_tokens_total", "Tokens of a step.", _TOKENS)

    def _ended(self, reason: FinishReason) -> Counter:
        return self._success.labels(self._model, ENGINE, _REASONS.get(reason, reason.value))

    def refuse(self) -> None:
        """A request found the queue full."""
        self._refused.inc()

    def tokens(self, running: Iterable[Sequence]) -> None:
        """These run, and may have got tokens. Those of samples that have ended were counted at their end."""
        gaps = list[float]()
        for sequence in running:
            if sequence.finish_reason is not None:
                continue
            key = sequence.request.request_id, sequence.index
            gaps += self._token_times(key, sequence.request.arrival_s, sequence.token_times_s)
            if sequence.token_times_s:
                self._seen[key] = len(sequence.token_times_s)
        if gaps:
            self._gaps.observe(np.array(gaps))

    def _token_times(
        self, key: tuple[str, int], arrival_s: float, times: list[float] | tuple[float, ...]
    ) -> list[float]:
        """The gaps before tokens that were not counted; a first token is counted here."""
        seen = self._seen.get(key, 0)
        if times and not seen:
            self._ttft.observe(times[0] - arrival_s)
        return [times[at] - times[at - 1] for at in range(max(seen, 1), len(times))]

    def step(self, record: StepRecord) -> None:
        """A step was done."""
        self.history.step(record)
        if self._pace is not None and not self._said_late:
            self._check_pace(self._pace)
        self._running.set(record.running)
        self._waiting.set(record.waiting)
        if record.pool is not None:
            self._usage.set(record.pool.block_utilization)
            self._fragmentation.set(record.pool.internal_fragmentation)
            self._cached.set(record.pool.blocks_cached)
        for field, counter in self._of_steps:
            counter.inc(getattr(record, field))
        if record.batch_seqs:
            self._tokens.observe(record.prefill_tokens + record.decode_tokens)
        if record.counters is not None:
            for field, counter in self._of_pool:
                counter.inc(getattr(record.counters, field))
            self._loaded.inc(record.counters.host_hit_tokens + record.counters.disk_hit_tokens)

    def accept(self, requests: Iterable[Request]) -> None:
        """These were queued."""
        for request in requests:
            self._most_tokens.observe(request.sampling.max_tokens)
            self._samples.observe(request.sampling.n)

    def finish(self, record: RequestRecord) -> None:
        """A sample of a request has ended."""
        self._ended(record.finish_reason).inc()
        self._prompt_lengths.observe(record.prompt_tokens)
        self._output_lengths.observe(len(record.output_token_ids))
        self._e2e.observe(record.finished_s - record.arrival_s)
        self._preemptions.observe(record.preemptions)
        if gaps := self._token_times(record.key, record.arrival_s, record.token_times_s):
            self._gaps.observe(np.array(gaps))
        self._seen.pop(record.key, None)
        if record.scheduled_s is None:
            return
        known = record.prompt_tokens if record.computed_prompt_tokens is None else record.computed_prompt_tokens
        self._computed.observe(max(0, known - record.cached_tokens))
        self._queue.observe(record.scheduled_s - record.arrival_s)
        if record.first_token_s is None:
            return
        last_s = record.token_times_s[-1]
        self._prefill.observe(record.first_token_s - record.scheduled_s)
        self._decode.observe(last_s - record.first_token_s)
        self._inference.observe(last_s - record.scheduled_s)
        self._tpot.observe((record.tpot_ms or 0.0) / 1000)  # 0 of one token, as vLLM's

    def watch(self, blocks: BlockTimes) -> None:
        """Report these too."""
        self._registry.register(_Families(lambda: blocks.families(self._model)))

    def describe_cache(self, **labels: object) -> None:
        """Report these of the KV cache: labels of a gauge that is 1."""
        own = {"model_name": self._model, "engine": ENGINE} | {name: str(value) for name, value in labels.items()}
        text = "The KV cache, as its labels say."
        Gauge("vllm:cache_config_info", text, list(own), registry=self._registry).labels(**own).set(1)

    def watch_events(self, events: KVEventPublisher) -> None:
        """Report how many batches of KV events were sent, and dropped."""
        text = "Batches of KV events."
        self._watch_count("kv_events_published", text, lambda: events.published)
        self._watch_count("kv_events_dropped", text, lambda: events.dropped)

    def watch_pace(self, clock: PacedClock) -> None:
        """Report how long a simulated device computed, and by how much this machine was slower; say so in the log
        once, where that is more than `_LATE_SHARE`.
        """
        self._pace = clock
        text = "Seconds that the simulated device computed."
        self._watch_count("simulated_seconds", text, lambda: clock.simulated_s)
        text = "Seconds by which steps began late, since this machine did not keep up."
        self._watch_count("late_seconds", text, lambda: clock.late_s)

    def _watch_count(self, name: str, text: str, count: Callable[[], float]) -> None:
        """Report what is counted elsewhere."""

        def families() -> Iterable[Metric]:
            family = CounterMetricFamily(f"kvlab:{name}", text, labels=_LABELS)
            family.add_metric([self._model, ENGINE], max(0.0, count()))
            yield family

        self._registry.register(_Families(families))

    def _check_pace(self, clock: PacedClock) -> None:
        if clock.late_share > _LATE_SHARE and clock.simulated_s + clock.late_s > _JUDGED_S * clock.factor:
            self._said_late = True
            _log.warning(
                "this machine does not keep up with the simulated device at server.time_factor=%g: steps take %.3g "
                "times as long as simulated, and so do the latencies it reports; a smaller factor would do",
                clock.factor,
                1 + clock.late_share,
            )

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
