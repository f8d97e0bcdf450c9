"""The sample of measured deployments, as the experiment reads and simulates it."""

from __future__ import annotations

import re

import pytest

from experiments.runs import configure
from experiments.simulated_vs_silicon.run import planned
from experiments.simulated_vs_silicon.sample import rows
from kvlab.engine.build import build_engine
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import RunPlan, plan_run

_NAMED = re.compile(r"_tp(\d+)(?:_\d+)?_ep(\d+)")


def test_devices_are_those_that_ids_name_where_experts_are_divided() -> None:
    pytest.importorskip("aiconfigurator_core")
    named = [(row, match) for row in rows() if (match := _NAMED.search(row.id)) is not None]
    assert len(named) > 500
    for row, match in named:
        assert row.devices == int(match[1]), row.id
        if not row.measured.startswith("2025-11"):  # when scripts divided experts, whatever ids say
            assert (row.expert_parallel > 1) == (int(match[2]) > 1), row.id


def test_what_the_sample_does_not_say_is_said_by_images_and_days() -> None:
    pytest.importorskip("aiconfigurator_core")
    every = list(rows())
    assert {row.is_speculative for row in every if row.version == "1.2.0rc6.post3"} == {True}
    assert not any(row.is_speculative for row in every if "DeepSeek" not in row.model)
    sglang = [row for row in every if row.backend == "sglang" and row.is_speculative]
    assert {row.devices for row in sglang} == {8}
    assert all(row.data_parallel == 1 for row in every if "Kimi" in row.model)
    november = [
        row for row in every if row.measured == "2025-11-02" and row.backend == "trtllm" and row.devices == 8
    ]
    assert {row.data_parallel for row in november if row.concurrency == 256} == {8}
    assert {row.expert_parallel for row in november if "DeepSeek" in row.model and row.concurrency == 4} == {8}


def test_blocks_behind_windows_are_kept_where_there_is_memory_which_changes_no_time() -> None:
    settings = [
        "executor=simulated",
        "executor.timing=roofline",
        "hardware=h200_sxm",
        "model=gpt_oss_120b",
        "model.max_seq_len=800",
        "kv=paged_unshared",
        "scheduler.max_batch_size=8",
        "scheduler.admission_reserve=0",
        "workload.name=closed",
        "workload.num_requests=24",
        "workload.prompt_len=400",
        "workload.output_len=300",
    ]

    def times(plan: RunPlan) -> list[tuple[float, ...]]:
        log = drive(build_engine(plan), plan.requests, concurrency=8)
        return [record.token_times_s for record in log.records]

    kept, given_back = planned(settings), plan_run(configure(settings))
    assert (bool(kept.pool.groups), bool(given_back.pool.groups)) == (False, True)
    assert times(kept) == times(given_back)
    assert planned([*settings, "kv.memory=200MiB"]).pool.groups
