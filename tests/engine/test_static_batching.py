"""A batch is formed, then run to the end of its longest member."""

from __future__ import annotations

import pytest

from kvlab.engine.clock import LogicalClock
from tests.support.engines import make_engine, request


class TestWait:
    """`max_wait_ms` on a clock that the test moves."""

    def test_a_full_batch_starts_at_once(self) -> None:
        clock = LogicalClock()
        engine = make_engine(clock=clock, policy="static", max_batch_size=2, max_wait_ms=100)
        engine.add_request(request("a", 4, 1))
        assert engine.step() is None
        engine.add_request(request("b", 4, 1))
        record = engine.step()
        assert record is not None
        assert (record.batch_seqs, clock.now()) == (2, 0.0)

    def test_one_that_is_not_full_starts_when_its_oldest_has_waited(self) -> None:
        clock = LogicalClock()
        engine = make_engine(clock=clock, policy="static", max_batch_size=4, max_wait_ms=100)
        clock.wait_until(5.0)
        engine.add_request(request("a", 4, 1, arrival_s=5.0))
        assert engine.step() is None
        clock.wait_until(5.07)
        engine.add_request(request("b", 4, 1, arrival_s=5.07))
        assert engine.step() is None
        assert engine.next_wakeup() == pytest.approx(5.1)
        clock.wait_until(5.0999)
        assert engine.step() is None
        clock.wait_until(engine.next_wakeup() or 0)
        record = engine.step()
        assert record is not None
        assert record.batch_seqs == 2
        assert record.start_s == pytest.approx(5.1)

    def test_no_wakeup_while_a_batch_runs_or_nothing_waits(self) -> None:
        engine = make_engine(clock=LogicalClock(), policy="static", max_batch_size=1, max_wait_ms=100)
        assert engine.next_wakeup() is None
        engine.add_request(request("a", 4, 3))
        engine.add_request(request("b", 4, 3))
        engine.step()
        assert engine.next_wakeup() is None

    def test_the_oldest_counts_though_it_was_submitted_later(self) -> None:
        clock = LogicalClock()
        engine = make_engine(clock=clock, policy="static", max_batch_size=4, max_wait_ms=100)
        clock.wait_until(1.0)
        engine.add_request(request("a", 4, 1, arrival_s=0.98))
        engine.add_request(request("b", 4, 1, arrival_s=0.95))
        assert engine.next_wakeup() == pytest.approx(1.05)


def test_continuous_batching_never_waits() -> None:
    engine = make_engine(max_batch_size=8, max_wait_ms=1000)
    engine.add_request(request("a", 4, 1))
    assert engine.next_wakeup() is None
    record = engine.step()
    assert record is not None
    assert record.batch_seqs == 1
