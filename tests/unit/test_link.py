"""Simulated links: what is sent waits for what was sent before."""

from __future__ import annotations

import pytest

from kvlab.kv.tiers.base import SimulatedLink


def test_transfers_queue_behind_each_other_and_their_latencies_overlap() -> None:
    link = SimulatedLink(bytes_per_s=100.0, latency_s=0.5)
    assert link.transfer(1.0, 200) == 3.5
    assert link.transfer(1.0, 100) == 4.5  # behind the first one's bytes, not behind its latency
    assert link.transfer(10.0, 100) == 11.5  # it was idle meanwhile
    assert link.seconds(100) == 1.5


@pytest.mark.parametrize(("rate", "latency"), [(0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (1.0, -1.0)])
def test_a_link_has_a_rate(rate: float, latency: float) -> None:
    with pytest.raises(ValueError, match="a link of"):
        SimulatedLink(rate, latency)
