"""The comparison with recordings: what it reads of one, and how it counts errors."""

from __future__ import annotations

import json

import pytest

from experiments.simulated_vs_recorded.run import Times, error, measured, simulate, timed_trace

ROWS = [
    {
        "arrival_s": 0.5 * number,
        "prompt_tokens": 40,
        "output_tokens": 5,
        "block_ids": [0, 1 + number],
        "scheduled_s": 0.5 * number + 0.1,
        "first_token_s": 0.5 * number + 0.2,
        "last_token_s": 0.5 * number + 0.6,
    }
    for number in range(3)
]


def test_times_are_read_and_the_rest_of_a_prompt_has_an_id_of_its_own() -> None:
    assert list(measured(ROWS)) == [pytest.approx((100, 200, 100, 600))] * 3
    ids = [json.loads(line)["hash_ids"] for line in timed_trace(ROWS)]
    assert ids == [[0, 1, 4], [0, 2, 5], [0, 3, 6]]


def test_each_request_is_simulated_in_order() -> None:
    simulated = simulate(
        ROWS,
        ["executor=simulated", "hardware=l4", "tracking=off", "workload=timed_trace", "model=qwen3_tiny"],
    )
    assert simulated.timing == "roofline"
    assert len(simulated.times) == 3
    assert all(0 <= times.queue <= times.ttft < times.whole for times in simulated.times)


def test_errors_of_the_mean_and_of_each() -> None:
    were, came = [Times(0, 10, 2, 100), Times(50, 30, 2, 300)], [Times(0, 20, 2, 110), Times(70, 20, 1, 270)]
    assert error(were, came, "whole") == pytest.approx((-0.05, 0.1))
    assert error(were, came, "ttft") == pytest.approx((0.0, (1 + 1 / 3) / 2))
    assert error(were, came, "queue") == pytest.approx((10 / 200, 10 / 200))
