"""What /metrics has, and that the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvlab.cli.compose import compose_run
from kvlab.config.server import ServerConfig
from kvlab.core import FinishReason, RequestRecord
from kvlab.engine.clock import LogicalClock
from kvlab.kv.journal import BlockEvent
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.storage import KVStorage
from kvlab.server.blocks import BlockTimes
from kvlab.server.build import build_serving
from kvlab.server.metrics import ServerMetrics
from kvlab.server.serving import Serving
from tests.support.engines import drain, make_engine, request
from tests.support.model import tiny_config
from tests.support.speculation import recalling
from tests.support.tiers import tiered_pool

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"
SIMULATED = ("model=qwen3_tiny", "executor=simulated", "hardware=h200_sxm", "kv.num_blocks=10")


@pytest.fixture(scope="module")
def serving() -> Serving:
    return build_serving(compose_run(SIMULATED).config, ServerConfig())


def samples(metrics: ServerMetrics) -> dict[str, float]:
    """The value of each sample without labels other than the model's and the engine's."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {each.name: each.value for family in families for each in family.samples if len(each.labels) == 2}


def times_of(metrics: ServerMetrics, name: str) -> tuple[float, float]:
    """How many there were, and how many seconds in all."""
    found = samples(metrics)
    return found[f"vllm:kv_block_{name}_seconds_count"], found[f"vllm:kv_block_{name}_seconds_sum"]


def test_blocks_live_from_their_allocation_to_their_eviction() -> None:
    clock, metrics = LogicalClock(), ServerMetrics("tiny")
    blocks = BlockTimes(4, clock)
    metrics.watch(blocks)
    clock.advance(10)
    blocks.add(BlockEvent.ALLOCATED, (1, 2))
    clock.advance(1)
    blocks.add(BlockEvent.FREED, [1, 2])
    blocks.add(BlockEvent.CACHED, [1])
    clock.advance(2)
    blocks.add(BlockEvent.SHARED, [1])
    clock.advance(4)
    blocks.add(BlockEvent.DROPPED, [1])
    assert times_of(metrics, "lifetime") == (1, 7)
    assert times_of(metrics, "idle_before_evict") == (1, 4)
    assert times_of(metrics, "reuse_gap") == (1, 3)
    within = {
        each.labels["le"]: each.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for each in family.samples
        if each.name == "vllm:kv_block_lifetime_seconds_bucket"
    }
    assert (within["5.0"], within["10.0"], within["+Inf"]) == (0, 1, 1)


def test_speculation_counts_what_it_proposed() -> None:
    asked, metrics = request("copies", 9, 17), ServerMetrics("tiny")
    plain = make_engine()
    sequence = plain.add_request(asked)
    drain(plain)
    with recalling([[*sequence.token_ids[:-4], 0, 0, 0, 0]]) as speculation:
        engine = make_engine(speculation=speculation)
        engine.add_request(asked)
        records = drain(engine)
    for record in records:
        metrics.step(record)
    found = samples(metrics)
    proposed, accepted = (
        found["vllm:spec_decode_num_draft_tokens_total"],
        found["vllm:spec_decode_num_accepted_tokens_total"],
    )
    assert 0 < accepted < proposed
    assert accepted == found["vllm:generation_tokens_total"] - sum(record.batch_seqs for record in records)


def test_a_pool_reports_its_evictions_and_hits() -> None:
    metrics, clock = ServerMetrics("tiny"), LogicalClock()
    blocks = BlockTimes(8, clock)
    metrics.watch(blocks)
    storage = KVStorage(tiny_config().kv_spec("float32"), 8, 4)
    pool = PagedKVCachePool(8, 4, 32, storage, prefix_sharing=True, journal=blocks)
    engine, size = make_engine(pool, clock=clock), pool.block_size
    for name in ("one", "one", "two", "three"):
        engine.submit(request(name, 3 * size + 1, 1))
        drain(engine)
    counters = pool.counters()
    assert times_of(metrics, "reuse_gap")[0] == counters.hit_tokens // size == 3
    assert times_of(metrics, "lifetime")[0] == times_of(metrics, "idle_before_evict")[0] > 0


def test_tokens_are_counted_while_their_requests_run_and_once() -> None:
    """One more starts meanwhile, and none is left behind that has ended."""
    metrics, engine = ServerMetrics("tiny"), make_engine()
    engine.submit(request("first", 9, 6), None, metrics.finish)
    counts = list[list[float]]()
    while engine.has_work():
        if len(counts) == 2:
            engine.submit(request("second", 9, 3), None, metrics.finish)
        if engine.step() is not None:
            metrics.tokens(engine.scheduler.running)
        found = samples(metrics)
        names = "time_to_first_token", "inter_token_latency"
        counts.append([found[f"vllm:{name}_seconds_count"] for name in names])
    assert counts[:5] == [[1, 0], [1, 1], [2, 2], [2, 4], [2, 6]]
    assert counts[-1] == [2, 7]
    assert samples(metrics)["vllm:request_generation_tokens_sum"] == 9


@pytest.mark.parametrize(("name", "named_by_rules", "longest_s"), [
    ("time_to_first_token", 0.25, 2400), ("e2e_request_latency", 0.3, 7200), ("request_queue_time", 0.3, 7200),
    ("request_prefill_time", 0.3, 7200), ("request_decode_time", 0.3, 7200), ("inter_token_latency", 0.025, 60),
])  # fmt: skip
def test_buckets_end_where_rules_for_vllm_name_them_and_behind_the_longest(
    name: str, named_by_rules: float, longest_s: float
) -> None:
    """Else a rule finds nothing, and of long requests a quantile is the largest end."""
    families = text_string_to_metric_families(ServerMetrics("tiny").text().decode())
    (family,) = (each for each in families if each.name == f"vllm:{name}_seconds")
    *ends, last = sorted({float(each.labels["le"]) for each in family.samples if "le" in each.labels})
    assert named_by_rules in ends
    assert (ends[-1] > longest_s, last) == (True, float("inf"))
    assert max(after / before for before, after in pairwise(ends)) <= 5  # how far a quantile may be off


def test_every_end_is_counted_from_0_on() -> None:
    """Of a value that is not 0 when it is first seen, Prometheus tells no growth."""
    found = re.findall(
        r'^vllm:request_success_total\{.*finished_reason="(\w+)".*\} 0\.0$',
        ServerMetrics("t").text().decode(),
        re.M,
    )
    assert set(found) == {"stop", "length", "abort", "error"}


@pytest.mark.parametrize(
    ("reason", "label"),
    [(FinishReason.STOP, "stop"), (FinishReason.LENGTH, "length"), (FinishReason.ABORTED, "abort"),
     (FinishReason.FAILED, "error")],
)  # fmt: skip
def test_ends_have_vllms_names(reason: FinishReason, label: str) -> None:
    metrics = ServerMetrics("tiny")
    metrics.finish(RequestRecord("r", 0, 0.0, 1, (), (), reason, 1.0))
    assert f'finished_reason="{label}"' in metrics.text().decode()


def test_every_metric_of_the_dashboard_exists(serving: Serving) -> None:
    text = serving.metrics.text().decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    existing = {name for name, kind in kinds.items() if kind != "histogram"}
    existing |= {
        name + end for name, kind in kinds.items() if kind == "histogram" for end in ("_bucket", "_sum", "_count")
    }
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    named = {name for expression in asked for name in re.findall(r"vllm:\w+", expression)}
    assert named <= existing, named - existing
    assert len(named) >= 15
    assert all('model_name="$model"' in expression for expression in asked)


def test_tokens_from_memory_behind_the_pool_are_counted() -> None:
    metrics, engine = ServerMetrics("tiny"), make_engine(tiered_pool(12, 64))
    for name, tokens in (("a", 40), ("filler", 44), ("a", 40)):
        engine.add_request(request(name, tokens, 4))
        for record in drain(engine):
            metrics.step(record)
    assert samples(metrics)["vllm:external_prefix_cache_hits_total"] == 40


def test_the_cache_is_described_as_routers_read_it(serving: Serving) -> None:
    families = text_string_to_metric_families(serving.metrics.text().decode())
    (sample,) = (each for family in families for each in family.samples if each.name == "vllm:cache_config_info")
    assert sample.value == 1
    assert {"block_size": "16", "num_gpu_blocks": "10", "engine": "0", "enable_prefix_caching": "True"}.items() <= (
        sample.labels.items()
    )


def test_every_metric_has_the_engine_beside_the_model(serving: Serving) -> None:
    families = text_string_to_metric_families(serving.metrics.text().decode())
    labels = [each.labels for family in families for each in family.samples]
    assert labels
    assert all({"model_name", "engine"} <= each.keys() for each in labels)
