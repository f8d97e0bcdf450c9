"""The sample of measured deployments, as the experiment reads it."""

from __future__ import annotations

import re

import pytest

from experiments.simulated_vs_silicon.sample import rows

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
