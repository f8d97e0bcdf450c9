"""Whether requests that arrive over time are served as fast, told from their records alone."""

from __future__ import annotations

import random

import pytest

from kvlab.core import FinishReason, RequestRecord
from kvlab.lab.results.load import offered_load


def record(number: int, arrival: float, end: float, scheduled: float | None = None) -> RequestRecord:
    return RequestRecord(f"r{number}", 0, arrival, 8, (1,), (end,), FinishReason.LENGTH, end, scheduled_s=scheduled)


def queue(rate: float, service_s: float, count: int, servers: int, seed: int) -> list[RequestRecord]:
    """Poisson arrivals at `servers` that each take exponential times of this mean, first come, first served."""
    chance, when = random.Random(seed), 0.0
    free, records = [0.0] * servers, []
    for number in range(count):
        when += chance.expovariate(rate)
        start = max(when, min(free))
        end = start + chance.expovariate(1 / service_s)
        free[free.index(min(free))] = end
        records.append(record(number, when, end, start))
    return records


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("share", "is_overloaded"), [(0.5, False), (0.7, False), (1.3, True), (2.0, True), (8.0, True)]
)
@pytest.mark.parametrize("servers", [1, 8])
def test_a_queue_is_overloaded_where_more_comes_than_can_be_served(
    servers: int, share: float, is_overloaded: bool, seed: int
) -> None:
    found = offered_load(queue(share * servers, 1.0, 600, servers, seed))
    assert found is not None
    assert found.is_overloaded == is_overloaded
    sentence = found.sentence()
    assert (sentence is not None and sentence.startswith("overloaded: ")) == is_overloaded
    if is_overloaded:
        assert found.sustained_per_s == pytest.approx(servers, rel=0.2)
        assert found.served_per_s < 0.85 * found.offered_per_s


def test_a_run_that_ends_while_it_fills_up_says_that_it_is_too_short() -> None:
    """Twenty requests within ten seconds that each take half a minute, all at once."""
    found = offered_load([record(number, number / 2, number / 2 + 30, number / 2) for number in range(20)])
    assert found is not None
    assert not found.is_overloaded
    assert "are too few to tell whether 2 requests a second can be held" in str(found.sentence())
    assert "workload.num_requests of 120 at least" in str(found.sentence())


def test_an_engine_that_has_room_for_all_is_not_overloaded() -> None:
    found = offered_load([record(number, number / 2, number / 2 + 30, number / 2) for number in range(300)])
    assert found is not None
    assert found.sentence() is None
    assert (found.left, found.before) == (60, 60)


@pytest.mark.parametrize("ends", [[], [1.0, 2.0, 2.5]])
def test_all_at_once_or_nothing_is_no_offered_load(ends: list[float]) -> None:
    assert offered_load([record(number, 0.0, end) for number, end in enumerate(ends)]) is None


def test_what_a_full_queue_refuses_was_offered() -> None:
    """Four requests a second, of which every other is refused, within ten seconds."""
    served = [record(number, number / 2, number / 2 + 0.1, number / 2) for number in range(21)]
    found = offered_load(served, [0.25 + number / 2 for number in range(20)])
    assert found is not None
    assert found.offered_per_s == pytest.approx(4.0)
    assert (found.left, found.before) == (1, 1)
    assert "4 requests a second offered, 2.08 served; a full queue refused 49 % of them" in str(found.sentence())
    few = offered_load(served[:8], [0.25 + number / 2 for number in range(4)])
    assert few is not None
    assert not few.is_overloaded
    assert offered_load(served[:1], [1.0, 2.0]) is not None
    assert offered_load(served[9:], [0.0] * 9) is not None  # none of the first quarter was served


@pytest.mark.parametrize("seed", range(20))
def test_an_engine_that_fills_its_batch_is_not_overloaded(seed: int) -> None:
    """A hundred requests within three seconds, each of which takes one, and longer as the batch grows."""
    chance, when, records = random.Random(seed), 0.0, []
    for number in range(100):
        when += chance.expovariate(33.0)
        records.append(record(number, when, when + 1.1 + 0.002 * number, when))
    found = offered_load(records)
    assert found is not None
    assert not found.is_overloaded
