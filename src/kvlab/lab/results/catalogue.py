"""Every metric of a run: its name, label, unit, formula, direction, digits and section.

Tables, reports, the axes of figures and the tables of docs/metrics.md are made from these entries. To add a metric,
add an entry here and the line that computes it, most often in `lab.metrics`. The name under which a server exports
a metric to Prometheus would be one more field of `Metric`.
"""

from collections.abc import Iterable
from dataclasses import replace

from kvlab.lab.results.metric import COST, GAIN, NEUTRAL, SPEED, TIME, Direction, Metric, family_of

#: Columns of steps.parquet that the tracking store follows as `series/<name>`.
SERIES = (
    *("running", "waiting", "blocks_in_use", "blocks_cached", "shared_blocks", "tokens_in_use"),
    *("blocks_allocated", "blocks_freed", "evicted_blocks", "prefill_tokens", "decode_tokens"),
)

#: Percentages that it follows beside them, made of those columns.
SHARES = ("kv_usage_percent", "fragmentation_percent")

TENANT_HITS = "kv/prefix_hit_rate/"  # how the hit rate of one tenant is called, before its salt
_COMPUTED = ("first_seen", "diverged", "other_salt", "tail", "groups", "not_shared")

#: The parts of a step that `debug=profile` measures.
_STEP_PARTS = ("attention", "linear", "elementwise", "sampling", "scheduling", "other")


def metric(name: str) -> Metric:
    """The entry of a metric; one that has none, such as a user's own, has its name for a label and no direction."""
    if name not in CATALOGUE and name.startswith(TENANT_HITS):
        entry, salt = CATALOGUE[f"{TENANT_HITS}<salt>"], name.removeprefix(TENANT_HITS)
        return replace(entry, name=name, label=entry.label.replace("<salt>", salt))
    return CATALOGUE.get(name) or Metric(name, name)


def direction(name: str) -> Direction:
    """What a difference in this metric means."""
    return metric(name).direction


def sections() -> dict[str, list[Metric]]:
    """The whole catalogue by section."""
    by_section: dict[str, list[Metric]] = {}
    for entry in CATALOGUE.values():
        by_section.setdefault(entry.section, []).append(entry)
    return by_section


def _latency(name: str, label: str, digits: int, in_table: str, formula: str, column: str = "") -> list[Metric]:
    """The distribution of a latency over completed requests."""
    parts = "mean", "p50", "p90", "p99"
    entries = family_of(f"latency/{name}_ms_*", parts, f"{label}, *", "ms", formula, TIME, digits)
    shown = (replace(entry, in_table=part in in_table) for part, entry in zip(parts, entries, strict=True))
    return [replace(entry, column=column if entry.name.endswith("p50") else "") for entry in shown]


def _catalogue(by_section: dict[str, Iterable[Metric]]) -> dict[str, Metric]:
    entries = [replace(entry, section=name) for name, section in by_section.items() for entry in section]
    return {entry.name: entry for entry in entries}


# fmt: off
CATALOGUE: dict[str, Metric] = _catalogue({
    "capacity": [
        Metric("capacity/kv_bytes", "KV cache", "bytes",
               "blocks x block_size x 2 x layers x kv_heads x (head_dim x bytes per element; scales included)",
               digits=1, in_table=True, column="KV cache"),
        Metric("capacity/token_slots", "token slots", "tokens", "blocks x block_size", digits=0, in_table=True),
        Metric("capacity/mean_length", "mean length of a sequence", "tokens",
               "mean over the workload's sequences of the length each grows to: its prompt, earlier turns "
               "included, and its output; where all of that is kept (`scheduler.reserve_output`) its `max_tokens`",
               digits=1),
        Metric("capacity/planned_sequences", "sequences that fit, planned", "sequences",
               "sequences of these lengths: blocks in the pool / mean of ceil(length / block_size), rounded "
               "down; what is shared is not counted off", digits=0),
        Metric("capacity/planned_running", "sequences at once, planned", "sequences",
               "`capacity/planned_sequences`, at most `scheduler.max_batch_size` and at most as many as the "
               "workload has: what `capacity/peak_running` is to be compared with", digits=0, in_table=True),
        Metric("capacity/peak_running", "sequences at once, peak", "sequences",
               "largest `running` (sequences that hold memory) of any step", GAIN, 0, True, "at once, peak"),
        Metric("capacity/mean_running", "sequences at once, mean", "sequences",
               "mean of `running`, each step weighted by its time", GAIN, 1, True),
        Metric("capacity/weight_bytes", "weights", "bytes",
               "weights as they are loaded, padding and scales included, and rotary tables"),
        Metric("capacity/working_bytes", "working memory", "bytes",
               "working memory of the largest step, as planned, see below"),
    ],
    "throughput": [
        Metric("duration_s", "duration", "s",
               "end of the last request; for an interrupted run, the moment it stopped", TIME, 2, True),
        Metric("throughput/output_tokens_per_s", "output tokens", "tok/s",
               "`tokens/output` / `duration_s`", SPEED, 1, True, "output tok/s"),
        Metric("throughput/total_tokens_per_s", "prompt + output tokens", "tok/s",
               "(`tokens/prompt` + `tokens/output`) / `duration_s`", SPEED, 1, True),
        Metric("throughput/requests_per_s", "completed requests", "req/s",
               "`requests/completed` / `duration_s`", SPEED),
        Metric("energy/output_token_j_most", "energy of an output token, at most", "J",
               "devices (with `fleet.scale` those that are there) x `hardware.power_watts` (of the data sheet) x "
               "`duration_s` / `tokens/output`: an upper bound, of simulated devices without their hosts; "
               "divided by 3.6, kWh of a million tokens",
               COST, 3, True, optional=True),
        Metric("efficiency/roofline_share", "of what the machine could do", "%",
               "the least time that the run's steps could take on this machine / the time they took, see below; "
               "CPU alone", SPEED, 1, True, alone="share of what the machine could do"),
    ],
    "latency": [
        *_latency("ttft", "first token", 0, "p50 p99", "first token - scheduled arrival", "first token p50, ms"),
        *_latency("tpot", "per output token", 1, "p50", "(e2el - ttft) / (n - 1), for requests of n > 1 tokens",
                  "per token p50, ms"),
        *_latency("e2el", "whole request", 0, "p50 p99", "last token - scheduled arrival"),
        *_latency("itl", "between two tokens", 1, "",
                  "every gap between two tokens of a request, pooled over requests"),
        *_latency("queue", "waiting for admission", 0, "", "first admission - scheduled arrival"),
    ],
    "service levels": [
        Metric("slo/goodput_per_s", "goodput, requests within limits", "req/s",
               "completed requests within each limit that is set (ttft <= `slo.ttft_ms`, tpot <= `slo.tpot_ms`) / "
               "`duration_s`", SPEED, 2, True, "goodput", optional=True),
        Metric("slo/attainment", "attainment, of all submitted", "%",
               "those requests / all submitted; one that failed, was refused or aborted counts as missed",
               GAIN, 1, True, optional=True),
        Metric("slo/ttft_attainment", "attainment, first token alone", "%",
               "the same with `slo.ttft_ms` alone", GAIN, 1, True, optional=True),
        Metric("slo/tpot_attainment", "attainment, per token alone", "%",
               "the same with `slo.tpot_ms` alone; a request of one output token has no tpot and counts as within",
               GAIN, 1, True, optional=True),
    ],
    "waste": [
        Metric("kv/block_utilization_mean", "blocks in use, mean", "%",
               "mean of blocks in use / blocks in the pool, weighted by time", digits=1, in_table=True),
        Metric("kv/block_utilization_peak", "blocks in use, peak", "%", "its largest value", digits=1),
        Metric("kv/token_utilization_mean", "token slots in use, mean", "%",
               "mean of stored tokens / token slots of the pool, weighted by time",
               GAIN, 1, True, "token slots used, %"),
        Metric("kv/internal_fragmentation_mean", "unused part of blocks in use", "%",
               "mean of 1 - stored tokens / token slots of blocks in use, weighted by time", COST, 1, True),
        Metric("tokens/prefill", "tokens computed in prefill", "tokens",
               "tokens computed other than by decoding: prompts less hits, and what was recomputed", COST, 0, True),
        Metric("kv/prefix_hit_tokens", "prompt tokens found in the cache", "tokens",
               "of prompts at their first admission, those served from cached blocks", GAIN, 0, True),
        Metric("kv/prefix_hit_rate", "share of prompt tokens found in the cache", "0 to 1",
               "`kv/prefix_hit_tokens` / prompt tokens at first admissions", GAIN, 3),
        Metric("kv/prefix_hit_rate/<salt>", "share of <salt>'s prompt tokens found", "0 to 1",
               "the same of the requests with one salt; of the 16 salts that have most prompt tokens", GAIN, 3),
        Metric("prompt/evicted_tokens", "prompt tokens computed though once cached", "tokens",
               "`figures=true`: had been cached and were evicted, of prompts at first admissions", COST, 0, True),
        *family_of("prompt/<part>_tokens", _COMPUTED, "prompt tokens computed, <part>", "tokens",
                 "the others that were computed, by the reasons of `kvlab explain`", NEUTRAL, 0),
        Metric("kv/same_step_hit_tokens", "hits computed in the same step", "tokens",
               "of those hits, tokens of blocks that another sequence computed in the same step", digits=0),
        Metric("kv/recompute_hit_tokens", "tokens found again after a preemption", "tokens",
               "that preempted sequences found again on their return; not among the hits", digits=0),
        Metric("kv/shared_blocks_peak", "blocks saved by sharing, peak", "blocks",
               "largest number of references beyond the first: blocks that sharing saved", GAIN, 0, True),
        Metric("kv/cow_copies", "blocks copied on write", "blocks",
               "copied before they were written, because another sequence referenced them", digits=0),
        Metric("kv/evictions", "evictions", "times",
               "times that memory for new tokens was taken from cached content", digits=0),
        Metric("kv/evicted_blocks", "cached blocks evicted", "blocks", "blocks so taken", digits=0, in_table=True),
        Metric("kv/pinned_blocks_peak", "pinned blocks, peak", "blocks",
               "largest number of blocks, in use or cached, that requests have pinned", digits=0),
        Metric("kv/pins_refused", "prefixes that were not pinned", "times",
               "because `kv.pinned_share` or its tenant's `kv.quota` was full", COST, 0),
        Metric("kv/pinned_evictions", "pinned blocks evicted", "blocks", "because nothing else was left", COST, 0),
        Metric("kv/quota_evictions", "blocks evicted for a quota", "blocks",
               "of `kv/evicted_blocks`, those of tenants that had more than `kv.quota`", digits=0),
        Metric("kv/expired_blocks", "blocks that expired", "blocks",
               "given up because no request had used them for `kv.ttl_s`", digits=0),
        Metric("kv/host_blocks_peak", "blocks in host memory, peak", "blocks",
               "largest number of blocks that `kv.offload` held", digits=0),
        Metric("kv/host_stored_blocks", "blocks copied to host memory", "blocks",
               "evicted from the pool while host memory did not have them", digits=0),
        Metric("kv/host_loaded_blocks", "blocks copied from host memory", "blocks",
               "because prompts hit them; several sequences may wait for one", digits=0),
        Metric("kv/host_hit_tokens", "tokens found in host memory", "tokens",
               "loaded instead of computed; at a first admission in `kv/prefix_hit_tokens` too", GAIN, 0, True,
               optional=True),
        Metric("kv/disk_blocks_peak", "blocks on disk, peak", "blocks",
               "largest number of blocks that `kv.offload_disk` held", digits=0),
        Metric("kv/disk_stored_blocks", "blocks copied to disk", "blocks",
               "evicted from host memory while the disk did not have them", digits=0),
        Metric("kv/disk_loaded_blocks", "blocks copied from disk", "blocks",
               "because prompts hit them; several sequences may wait for one", digits=0),
        Metric("kv/disk_hit_tokens", "tokens found on disk", "tokens",
               "loaded instead of computed; at a first admission in `kv/prefix_hit_tokens` too", GAIN, 0, True,
               optional=True),
        Metric("kv/store_s", "time of copies to host memory and disk", "s",
               "of all copies; those to host memory delay the step that evicts", digits=3),
        Metric("kv/load_s", "time of copies from host memory and disk", "s",
               "of all copies, while other sequences run", digits=3),
        Metric("kv/failed_pages", "blocks that host memory or disk lost", "blocks",
               "written or read in vain: their tokens were computed", COST, 0),
        Metric("kv/swapped_out_blocks", "blocks swapped out", "blocks",
               "kept in host memory or on disk for sequences that were preempted", digits=0),
        Metric("kv/swapped_in_blocks", "blocks swapped in", "blocks",
               "of those, copied back when the sequences returned; the pool had the others still", digits=0),
        Metric("kv/blocks_allocated", "blocks allocated", "blocks", "handed out over the run", digits=0),
        Metric("kv/blocks_freed", "blocks freed", "blocks", "returned over the run", digits=0),
        Metric("kv/blocks_allocated_per_s", "blocks allocated", "blocks/s", "`kv/blocks_allocated` / `duration_s`"),
        Metric("kv/blocks_freed_per_s", "blocks freed", "blocks/s", "`kv/blocks_freed` / `duration_s`"),
        Metric("kv/leaked_blocks", "blocks leaked", "blocks",
               "referenced at the end by no sequence; anything but 0 is a defect", COST, 0),
        Metric("requests/preemptions", "preemptions", "times",
               "times a sequence gave up its memory and was queued again", COST, 0, True, "preemptions"),
        Metric("tokens/recomputed", "tokens computed twice", "tokens",
               "tokens computed again after a preemption", COST, 0, True),
        Metric("tokens/recomputed_share", "their share of all computed", "%",
               "`tokens/recomputed` / all tokens computed, by prefill or decode", COST, 1, True,
               "computed twice, %", alone="tokens computed twice, of all computed"),
    ],
    "requests": [
        Metric("load/offered_per_s", "offered", "req/s",
               "requests but the first / time from the first arrival to the last; where they arrive over time",
               NEUTRAL, 2, True, alone="requests offered", optional=True),
        Metric("load/served_per_s", "served", "req/s",
               "`requests/completed` / time from the first arrival to the last end; less than what is offered "
               "where the engine falls behind, and in a short run", SPEED, 2, True, "", "requests served",
               optional=True),
        Metric("requests/completed", "completed", "requests", "ended as asked", NEUTRAL, 0, True, "",
               "completed requests"),
        Metric("requests/failed", "failed", "requests", "ended by an error", COST, 0, True, "", "failed requests"),
        Metric("requests/refused", "refused", "requests", "not taken, because as many were waiting as "
               "`scheduler.max_waiting_requests` allows", COST, 0, True, alone="refused requests"),
        Metric("tokens/prompt", "prompt tokens served", "tokens",
               "prompt tokens served, computed or found in the cache, each counted once", digits=0),
        Metric("tokens/output", "tokens produced", "tokens", "tokens produced", digits=0),
    ],
    "quality": [
        Metric("quality/logit_error_mean", "error of a logit, mean", "",
               "mean absolute difference of a logit to that of the same model in executor.dtype", COST, 4),
        Metric("quality/logit_error_max", "error of a logit, largest", "", "its largest value", COST, 4),
        Metric("quality/top1_agreement", "positions with the same most likely token", "0 to 1",
               "share of positions at which both models give the same most likely token", GAIN, 3),
        Metric("quality/kl_mean", "divergence of the next token, mean", "nats",
               "sum of P (log P - log Q) over the vocabulary, P in executor.dtype: KL divergence", COST, 5),
        Metric("quality/perplexity", "perplexity", "", "exp(-mean log probability of a prompt's tokens)", COST, 3),
        Metric("quality/reference_perplexity", "perplexity in executor.dtype", "", "of the same", NEUTRAL, 3),
    ],
    "engine": [
        Metric("engine/steps", "steps", "steps",
               "forward passes (the log also has steps that only gave memory back, `batch_seqs` 0)", digits=0),
        Metric("engine/failed_passes", "failed forward passes", "passes",
               "forward passes that raised; what could be was run again in the same step", COST, 0),
        Metric("engine/step_ms_p50", "time of a step, p50", "ms", "median time of a step", TIME),
        *family_of("engine/schedule_ms_*", ("p50", "p99"), "scheduling of a step, *", "ms",
                 "part of a step before the model: retire, admit, plan, reserve, view", TIME, 3),
        Metric("engine/load_s", "loading", "s",
               "engines in a process that the run starts: until they are ready to serve", TIME, 1, optional=True,
               in_table=True),
        Metric("engine/compile_s", "compiling", "s", "of that time, what the engine says it compiled", TIME, 1),
        Metric("engine/batch_tokens_mean", "tokens in a batch, mean", "tokens", "tokens of a step's batch",
               digits=1),
        Metric("engine/batch_seqs_mean", "sequences in a batch, mean", "sequences", "sequences of a step's batch",
               digits=1),
    ],
    "fleet": [
        Metric("fleet/replicas", "replicas", "replicas", "`fleet.replicas`, where there are several", digits=0,
               in_table=True, optional=True),
        Metric("fleet/imbalance", "most work of a replica, of the mean", "", "tokens that a replica computed: the "
               "most / the mean; 1: all the same", COST, 2, True, optional=True, alone="imbalance of replicas"),
        Metric("fleet/busy_least", "busy time of the least busy replica", "%", "time in steps / time from the "
               "first step's start to the last step's end", NEUTRAL, 0, True, optional=True),
        Metric("fleet/store_written_blocks", "blocks written to the store", "blocks", "`fleet.store`: blocks that "
               "replicas computed and it had not", digits=0, in_table=True, optional=True),
        Metric("fleet/store_loaded_blocks", "blocks loaded from the store", "blocks", "blocks that came back",
               digits=0, in_table=True, optional=True),
        Metric("fleet/store_hit_tokens", "prompt tokens found in the store", "tokens", "tokens of prompts "
               "whose K and V came from there", GAIN, 0, True, optional=True),
        Metric("fleet/pulls", "prefixes pulled from neighbours", "transfers", "`fleet.neighbours`: transfers of a "
               "prefix that another replica had", digits=0, in_table=True, optional=True),
        Metric("fleet/pulled_bytes", "K and V pulled from neighbours", "bytes", "bytes of these", in_table=True,
               optional=True),
        Metric("fleet/pulled_hit_tokens", "prompt tokens pulled from neighbours", "tokens", "tokens of prompts "
               "whose K and V came from there", GAIN, 0, True, optional=True),
        Metric("fleet/hit_rate_ceiling", "most that caches could find", "0 to 1", "tokens of prompts that one "
               "cache would find which is never full and which all replicas have in common / those of all; where "
               "`figures` or `fleet.neighbours` is true", NEUTRAL, 3, optional=True),
        Metric("fleet/duplicate_tokens_mean", "cached twice, mean", "tokens", "tokens that a replica's cache holds "
               "and another's too, over the run: of three copies two; counted where `figures` or "
               "`fleet.neighbours` is true", NEUTRAL, 0, optional=True),
        Metric("fleet/duplicate_tokens_peak", "cached twice, most", "tokens", "the most of these at a moment",
               NEUTRAL, 0, optional=True),
        Metric("fleet/duplicate_share_mean", "share cached twice", "%", "100 * the mean of these / that of the "
               "tokens that all caches hold", NEUTRAL, 1, True, optional=True),
        Metric("fleet/duplicate_share_peak", "share cached twice, at the most", "%", "100 * the most of these / "
               "what all caches hold at that moment", NEUTRAL, 1, optional=True),
        Metric("fleet/replicas_mean", "replicas, mean", "replicas", "`fleet.scale`: replicas that are there, that "
               "warm up, serve or end what they have, over the run", COST, 2, True, optional=True),
        Metric("fleet/started", "replicas started", "replicas", "`fleet.scale`: how often one was", digits=0,
               in_table=True, optional=True),
        Metric("fleet/retried", "sent again", "requests", "`fleet.life`: requests that were lost with a replica, "
               "and served by another from the beginning", digits=0, in_table=True, optional=True),
        Metric("fleet/lost_tokens", "computed and lost", "tokens", "`fleet.life`: tokens that replicas which died "
               "had computed: of prompts and outputs of requests that were lost, and of prompts that no other had "
               "pulled yet", COST, 0, True, optional=True),
        Metric("fleet/transfers", "prompts pulled from another replica", "transfers", "`fleet.prefill`: transfers "
               "of a prompt's K and V", digits=0, in_table=True, optional=True),
        Metric("fleet/transfer_bytes", "K and V pulled", "bytes", "bytes of these", in_table=True, optional=True),
        *(replace(entry, in_table=True, optional=True) for entry in family_of(
            "fleet/transfer_ms_*", ("p50", "p99"), "K and V pulled, *", "ms",
            "from the moment at which a replica has blocks for a prompt, and that is computed, until its K and V "
            "are there, other transfers that it waits for included", TIME, 1)),
    ],
    "speculation": [
        Metric("speculation/proposed_tokens", "tokens proposed", "tokens",
               "`scheduler.speculation.method`: tokens that were proposed, and checked by the model", digits=0),
        Metric("speculation/accepted_tokens", "tokens accepted", "tokens",
               "of those, the tokens that the model picked itself", GAIN, 0, True, optional=True),
        Metric("speculation/acceptance_rate", "share of proposed tokens accepted", "%",
               "100 * `speculation/accepted_tokens` / `speculation/proposed_tokens`", GAIN, 1, True, optional=True),
        Metric("speculation/tokens_per_step", "tokens of a sequence per step", "tokens",
               "that a sequence gets in a step in which it decodes, mean: 1 + `speculation/accepted_tokens` / "
               "(sequences that decode, summed over steps)", GAIN, 2, True, optional=True),
    ],
    "client": [
        *family_of("client/send_lag_ms_*", ("p50", "p99"), "sent after its arrival, *", "ms",
                 "engines other than kvlab's, open load: from a request's arrival to its sending, without those at "
                 "0 s; above 5 ms (p99) the run is invalid", TIME, 2),
    ],
    "profile": [
        *family_of("profile/<part>_ms_mean", _STEP_PARTS, "<part>, mean", "ms",
                 "`debug=profile`: time of a part of a step, mean over steps with a batch", TIME, 3),
        *family_of("profile/<part>_share", _STEP_PARTS, "<part>, share of a step", "%",
                 "that part's time / the time of those steps", NEUTRAL, 1),
    ],
})
# fmt: on
