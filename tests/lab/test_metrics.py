"""The figures of a run, on logs small enough to compute by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvlab.config import SloConfig
from kvlab.core import FinishReason, PoolCounters, PoolStats, Request, RequestRecord, SamplingParams, StepRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.protocol import EngineReport, EngineSeries
from kvlab.kv.sizing import PoolSize
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.metrics import run_metrics, speculation_metrics
from kvlab.lab.results.requests import latencies_ms
from kvlab.lab.run.progress import RemainingTime

POOL = PoolSize(num_blocks=10, block_size=4, bytes_per_token=8)
COUNTS = (
    "blocks_allocated",
    "blocks_freed",
    "evictions",
    "evicted_blocks",
    "cow_copies",
    "prompt_tokens",
    "hit_tokens",
    "same_step_hit_tokens",
    "recompute_hit_tokens",
)


def request(
    arrival: float, prompt: int, times: list[float], reason: FinishReason = FinishReason.LENGTH, **fields: Any
) -> RequestRecord:
    return RequestRecord(
        "r", 0, arrival, prompt, tuple(range(len(times))), tuple(times), reason, times[-1], **fields
    )


def step(
    start: float,
    end: float,
    *,
    running: int = 1,
    blocks: int = 1,
    tokens: int = 1,
    shared_blocks: int = 0,
    **fields: int,
) -> StepRecord:
    counts = {name: fields.pop(name) for name in COUNTS if name in fields}
    return StepRecord(
        start_s=start,
        end_s=end,
        running=running,
        schedule_ms=1.0,
        execute_ms=2.0,
        pool=PoolStats(4, 10, blocks, tokens, shared_blocks=shared_blocks),
        counters=PoolCounters(**counts),
        **{"index": 0, "waiting": 0, "prefill_tokens": 0, "decode_tokens": 0, "batch_seqs": running, **fields},
    )


def test_latencies_count_from_the_arrival() -> None:
    found = latencies_ms([request(1.0, 3, [1.5, 1.75, 2.5], scheduled_s=1.25)])
    values = {name: each.tolist() for name, each in found.items()}
    assert values == {"ttft": [500], "e2el": [1500], "queue": [250], "tpot": [500], "itl": [250, 750]}


def test_one_token_has_no_time_per_output_token() -> None:
    found = latencies_ms([request(0.0, 3, [0.5], scheduled_s=0.0)])
    assert found["tpot"].tolist() == found["itl"].tolist() == []


def test_throughput_counts_tokens_of_every_request() -> None:
    log = RunLog(
        records=[
            request(0.0, 6, [1.0, 2.0], scheduled_s=0.0, computed_prompt_tokens=6),
            request(0.0, 8, [4.0], FinishReason.ABORTED, scheduled_s=0.0, computed_prompt_tokens=5),
        ],
        steps=StepLog(
            [step(0, 3, blocks_allocated=5, blocks_freed=1), step(3, 4, blocks_allocated=2, blocks_freed=6)]
        ),
        duration_s=4.0,
    )
    metrics = run_metrics(log, POOL, leaked_blocks=0)
    assert metrics["tokens/prompt"] == 6 + 5  # of the second only five were computed
    assert metrics["tokens/output"] == 3
    assert metrics["throughput/output_tokens_per_s"] == 0.75
    assert metrics["throughput/total_tokens_per_s"] == 3.5
    assert metrics["requests/completed"] == 1
    assert metrics["throughput/requests_per_s"] == 0.25
    assert metrics["latency/ttft_ms_p50"] == 1000  # completed requests alone
    assert (metrics["kv/blocks_allocated"], metrics["kv/blocks_allocated_per_s"]) == (7, 1.75)
    assert (metrics["kv/blocks_freed"], metrics["kv/blocks_freed_per_s"]) == (7, 1.75)


def test_tenants_have_hit_rates_and_what_is_kept_is_counted_where_there_is_any() -> None:
    plain = RunLog(records=[request(0.0, 6, [1.0], scheduled_s=0.0)], steps=StepLog([step(0, 3)]), duration_s=4.0)
    kept = {"kv/pinned_blocks_peak", "kv/pins_refused", "kv/pinned_evictions", "kv/quota_evictions"}
    assert not {name for name in run_metrics(plain, POOL) if "<" in name or name in kept or name.endswith("/a")}
    records = [
        request(0.0, 6, [1.0], scheduled_s=0.0, salt="a b", cached_tokens=3),
        request(0.0, 2, [1.0], scheduled_s=0.0, salt="a b"),
        request(0.0, 9, [1.0], scheduled_s=0.0, salt="c%/"),
        request(0.0, 6, [1.0], scheduled_s=0.0, salt="c__", cached_tokens=3),  # whose name is the same
        request(0.0, 9, [1.0], scheduled_s=0.0),
    ]
    steps = [step(0, 3), replace(step(3, 4), counters=PoolCounters(expired_blocks=2, pins_refused=1))]
    metrics = run_metrics(RunLog(records=records, steps=StepLog(steps), duration_s=4.0), POOL)
    rates = {name: value for name, value in metrics.items() if name.startswith("kv/prefix_hit_rate/")}
    assert rates == {"kv/prefix_hit_rate/a b": 3 / 8, "kv/prefix_hit_rate/c__": 0, "kv/prefix_hit_rate/c__ 2": 0.5}
    assert {name: metrics[name] for name in kept} == dict.fromkeys(kept, 0) | {"kv/pins_refused": 1}
    assert metrics["kv/expired_blocks"] == 2


def test_an_engine_without_steps_is_known_by_its_series() -> None:
    """Means over its samples, and what its counters gained in the run."""
    columns: dict[str, list[float]] = {
        "running": [0, 4, 2],
        "kv_usage": [0.0, 0.5, 0.25],
        "preemptions": [3, 3, 5],
        "prefix_hits": [10, 20, 40],
        "prefix_queries": [100, 150, 160],
        "waiting": [],
    }
    report = EngineReport(metrics={"kv/evictions": 7}, series=EngineSeries([0.0, 1.0, 2.0], columns))
    metrics = run_metrics(RunLog(duration_s=2.0, engine_report=report))
    expected = {
        "capacity/peak_running": 4,
        "capacity/mean_running": 2,
        "kv/block_utilization_mean": 25,
        "kv/block_utilization_peak": 50,
        "requests/preemptions": 2,
        "kv/prefix_hit_tokens": 30,
        "kv/prefix_hit_rate": 0.5,
        "kv/evictions": 7,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_memory_means_are_weighted_by_time() -> None:
    steps = [step(0, 3, running=2, blocks=4, tokens=12), step(3, 4, running=4, blocks=8, tokens=16)]
    metrics = run_metrics(RunLog(steps=StepLog(steps), duration_s=4.0), POOL, leaked_blocks=0)
    assert metrics["capacity/peak_running"] == 4
    assert metrics["capacity/mean_running"] == 2.5
    assert metrics["kv/block_utilization_mean"] == pytest.approx(50)
    assert metrics["kv/block_utilization_peak"] == pytest.approx(80)
    assert metrics["kv/token_utilization_mean"] == pytest.approx(100 * (0.75 * 12 + 0.25 * 16) / 40)
    assert metrics["kv/internal_fragmentation_mean"] == pytest.approx(100 * (0.75 * 0.25 + 0.25 * 0.5))


def test_a_step_that_only_gave_memory_back_counts_for_its_blocks_alone() -> None:
    computing = step(0, 3, running=2, blocks=4, tokens=12, prefill_tokens=6, decode_tokens=2)
    release = step(3, 4, running=0, blocks=0, tokens=0, blocks_freed=4)
    metrics = run_metrics(RunLog(steps=StepLog([computing, release]), duration_s=4.0), POOL, leaked_blocks=0)
    assert metrics["engine/steps"] == 1
    assert metrics["kv/blocks_freed"] == 4
    assert metrics["engine/batch_tokens_mean"] == 8
    assert metrics["engine/batch_seqs_mean"] == 2


def test_hits_are_a_share_of_the_prompt_tokens_of_first_admissions() -> None:
    steps = [
        step(0, 1, prompt_tokens=20, hit_tokens=0),
        step(1, 2, prompt_tokens=20, hit_tokens=12, same_step_hit_tokens=4, shared_blocks=3),
        step(2, 3, recompute_hit_tokens=16, evictions=1, evicted_blocks=2, cow_copies=1, shared_blocks=1),
    ]
    metrics = run_metrics(RunLog(steps=StepLog(steps), duration_s=3.0), POOL, leaked_blocks=2)
    assert metrics["kv/prefix_hit_rate"] == 0.3
    assert (metrics["kv/prefix_hit_tokens"], metrics["kv/same_step_hit_tokens"]) == (12, 4)
    assert metrics["kv/recompute_hit_tokens"] == 16
    assert (metrics["kv/evictions"], metrics["kv/evicted_blocks"], metrics["kv/cow_copies"]) == (1, 2, 1)
    assert (metrics["kv/shared_blocks_peak"], metrics["kv/leaked_blocks"]) == (3, 2)


def test_recomputed_tokens_are_a_share_of_all_that_were_computed() -> None:
    steps = [
        step(0, 1, prefill_tokens=30),
        step(1, 2, prefill_tokens=10, decode_tokens=2, recomputed_tokens=8, failed_passes=1),
        step(2, 3, decode_tokens=8, recomputed_tokens=2, failed_passes=2),
    ]
    metrics = run_metrics(RunLog(steps=StepLog(steps), duration_s=3.0, refused=["x", "y"]), POOL, leaked_blocks=0)
    assert metrics["tokens/recomputed"] == 10
    assert metrics["tokens/recomputed_share"] == 20.0  # percent
    assert metrics["engine/failed_passes"] == 3
    assert metrics["requests/refused"] == 2


def test_speculation_is_counted_for_each_sequence_and_step() -> None:
    steps = [
        step(0, 1, prefill_tokens=30),
        step(1, 2, decode_tokens=2 + 8, proposed_tokens=8, accepted_tokens=3),
        step(2, 3, decode_tokens=2),
    ]
    assert speculation_metrics(StepLog(steps)) == {
        "speculation/proposed_tokens": 8,
        "speculation/accepted_tokens": 3,
        "speculation/acceptance_rate": 37.5,
        "speculation/tokens_per_step": 1 + 3 / 4,
    }
    plain = speculation_metrics(StepLog(steps[2:]))
    assert plain == {
        "speculation/proposed_tokens": 0,
        "speculation/accepted_tokens": 0,
        "speculation/tokens_per_step": 1.0,
    }
    assert speculation_metrics(StepLog(steps[:1])).keys() == {
        "speculation/proposed_tokens",
        "speculation/accepted_tokens",
    }


def service_levels(log: RunLog, slo: SloConfig) -> dict[str, float]:
    """The metrics of service levels by the last part of their names."""
    metrics = run_metrics(log, slo=slo)
    return {name.removeprefix("slo/"): value for name, value in metrics.items() if name.startswith("slo/")}


def test_goodput_counts_requests_within_both_limits() -> None:
    records = [
        request(1.0, 3, [1.5, 2.0]),  # both at their limits
        request(0.0, 3, [0.4, 1.0]),  # too slow per token
        request(0.0, 3, [0.6, 0.7]),  # its first token too late
        request(0.0, 3, [0.5]),  # one token, which has no tpot
    ]
    log = RunLog(records=records, duration_s=4.0)
    assert service_levels(log, SloConfig(ttft_ms=500, tpot_ms=500)) == {
        "goodput_per_s": 0.5, "attainment": 50, "ttft_attainment": 75, "tpot_attainment": 75,
    }  # fmt: skip
    assert service_levels(log, SloConfig(ttft_ms=500)) == {
        "goodput_per_s": 0.75, "attainment": 75, "ttft_attainment": 75,
    }  # fmt: skip
    assert service_levels(log, SloConfig()) == {}


def test_requests_that_did_not_complete_miss_every_limit() -> None:
    records = [
        request(0.0, 3, [0.1, 0.2]),
        request(0.0, 3, [0.1, 0.2], FinishReason.FAILED),
        request(0.0, 3, [0.1], FinishReason.ABORTED),
    ]
    log = RunLog(records=records, refused=["full"], duration_s=1.0)
    assert service_levels(log, SloConfig(ttft_ms=500, tpot_ms=500)) == {
        "goodput_per_s": 1, "attainment": 25, "ttft_attainment": 25, "tpot_attainment": 25,
    }  # fmt: skip


def test_where_nothing_was_served_attainment_is_0_and_where_nothing_was_asked_there_is_none() -> None:
    slo = SloConfig(ttft_ms=500)
    assert service_levels(RunLog(refused=["full"]), slo) == {"attainment": 0, "ttft_attainment": 0}
    assert service_levels(RunLog(), slo) == {}


def test_a_completed_request_without_a_token_has_no_first_token_in_time() -> None:
    nothing = RequestRecord("r", 0, 0.0, 3, (), (), FinishReason.STOP, 0.1)
    log = RunLog(records=[nothing], duration_s=1.0)
    assert service_levels(log, SloConfig(ttft_ms=500, tpot_ms=500)) == {
        "goodput_per_s": 0, "attainment": 0, "ttft_attainment": 0, "tpot_attainment": 100,
    }  # fmt: skip


def test_a_run_without_steps_has_no_made_up_figures() -> None:
    metrics = run_metrics(RunLog(), POOL, leaked_blocks=0)
    assert not [name for name in metrics if name.startswith(("latency/", "throughput/"))]
    assert "kv/prefix_hit_rate" not in metrics
    assert "tokens/recomputed_share" not in metrics
    assert metrics["capacity/kv_bytes"] == 320


def test_time_left_learns_what_prefill_and_decode_cost() -> None:
    requests = [Request(f"r{i}", tuple(range(1000)), SamplingParams(max_tokens=501)) for i in range(40)]
    left, log = RemainingTime(requests), StepLog()
    assert left.seconds(0.0, log) is None
    clock = prefilled = decoded = 0.0
    for running in range(1, 41):  # a prompt a step, while those before decode
        cost = 1000 * 0.001 + (running - 1) * 0.02
        log.append(step(clock, clock + cost, prefill_tokens=1000, decode_tokens=running - 1))
        clock, prefilled, decoded = clock + cost, prefilled + 1000, decoded + running - 1
    expected = (40_000 - prefilled) * 0.001 + (40 * 500 - decoded) * 0.02
    assert left.seconds(clock, log) == pytest.approx(expected, rel=0.2)


def test_time_left_counts_replicas_that_are_busy_at_once() -> None:
    left = RemainingTime([Request(f"r{i}", (1, 2), SamplingParams(max_tokens=101)) for i in range(8)])
    log = StepLog(
        step(at, at + 1.0, prefill_tokens=2 * (not at), decode_tokens=1) for at in range(50) for _ in "1234"
    )
    estimate = left.seconds(50.0, log)  # after 200 of 800 tokens, by four replicas
    assert estimate == pytest.approx(150.0, rel=0.1)


def test_time_left_is_not_thrown_by_early_noise() -> None:
    """Steps of much prefill and little decode say next to nothing about what decoding costs."""
    left = RemainingTime([Request(f"r{i}", tuple(range(500)), SamplingParams(max_tokens=101)) for i in range(40)])
    log = StepLog(
        step(0, seconds, prefill_tokens=500, decode_tokens=decode)
        for decode, seconds in enumerate([10.0, 9.0, 16.0, 12.0])
    )
    per_token = 47 / 2000
    estimate = left.seconds(47.0, log)
    assert estimate is not None
    assert estimate == pytest.approx(36 * 500 * per_token + 3994 * 3 * per_token, rel=0.25)


def test_time_left_waits_for_the_last_arrival() -> None:
    left = RemainingTime([Request("r", (1, 2), SamplingParams(max_tokens=2), arrival_s=30.0)])
    assert left.seconds(10.0, StepLog([step(0, 1, prefill_tokens=2)])) == pytest.approx(20.0)
