"""Settings of the scheduler: those that go together, and those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.config import (
    PreemptionConfig,
    RunConfig,
    SchedulerConfig,
    SloConfig,
)
from kvlab.errors import ConfigError


class TestScheduler:
    @pytest.mark.parametrize(
        ("key", "settings", "reason"),
        [
            (
                "order",
                {"order": "random"},
                "prefill_first, priority, shortest_first",
            ),
            ("on_exhaustion", {"on_exhaustion": "pray"}, "known: preempt, fail"),
            ("admission_reserve", {"admission_reserve": 1.0}, r"must be in \[0, 1\)"),
            ("admission_reserve", {"admission_reserve": -0.1}, r"must be in \[0, 1\)"),
            ("admission_reserve", {"admission_reserve": float("nan")}, r"must be in \[0, 1\)"),
            ("watermark", {"watermark": 1.0}, r"must be in \[0, 1\)"),
            ("max_decode_seqs", {"max_decode_seqs": 0}, "at least 1"),
            ("max_waiting_requests", {"max_waiting_requests": 0}, "at least 1"),
            ("long_prefill_threshold", {"long_prefill_threshold": 0}, "at least 1"),
            (
                "long_prefill_threshold",
                {"long_prefill_threshold": 600},
                "more than scheduler.max_batched_tokens=512: it would limit nothing",
            ),
            (
                "preemption.victim",
                {"on_exhaustion": "fail", "preemption": PreemptionConfig("priority")},
                "never preempts; leave it null, or set on_exhaustion=preempt",
            ),
            (
                "order",
                {"policy": "static", "order": "priority"},
                "leave it fcfs, or take scheduler.policy=continuous",
            ),
            ("reserve_output", {"policy": "static", "reserve_output": False}, "leave it True"),
            ("on_exhaustion", {"policy": "static", "on_exhaustion": "preempt"}, "leave it null"),
            (
                "preemption.victim",
                {"policy": "static", "preemption": PreemptionConfig("last_admitted")},
                "none is preempted; leave it null",
            ),
        ],
        ids=str,
    )
    def test_what_contradicts_is_refused_by_key(self, key: str, settings: dict[str, Any], reason: str) -> None:
        with pytest.raises(ConfigError, match=reason) as caught:
            SchedulerConfig(**settings)
        assert caught.value.key == f"scheduler.{key}"

    def test_an_unknown_victim_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="known: fewest_generated, last_admitted, priority") as caught:
            PreemptionConfig("the tallest")
        assert (caught.value.key, caught.value.value) == ("scheduler.preemption.victim", "the tallest")

    @pytest.mark.parametrize(
        ("policy", "asked", "reserves"),
        [
            ("static", None, True),
            ("static", True, True),
            ("continuous", None, False),
            ("continuous", False, False),
            ("continuous", True, True),
        ],
    )
    def test_static_batches_reserve_whole_outputs(self, policy: str, asked: bool | None, reserves: bool) -> None:
        assert SchedulerConfig(policy=policy, reserve_output=asked).reserves_output is reserves


@pytest.mark.parametrize(
    ("metric", "slo", "missing"),
    [
        ("slo/goodput_per_s", SloConfig(), "set slo.ttft_ms, slo.tpot_ms or both"),
        ("slo/attainment", SloConfig(), "set slo.ttft_ms, slo.tpot_ms or both"),
        ("slo/ttft_attainment", SloConfig(tpot_ms=50), "set slo.ttft_ms"),
        ("slo/tpot_attainment", SloConfig(ttft_ms=500), "set slo.tpot_ms"),
    ],
)
def test_what_is_optimized_needs_its_limit(metric: str, slo: SloConfig, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"needs a limit; {missing}, in milliseconds") as caught:
        RunConfig(slo=slo, optimize=metric)
    assert caught.value.key == "optimize"
    RunConfig(slo=SloConfig(ttft_ms=500, tpot_ms=50), optimize=metric)
