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
