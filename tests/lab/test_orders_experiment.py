"""experiments/orders: every order serves the same requests, and each request is in one class."""

from __future__ import annotations

from experiments.orders.benchmark import (
    AGING,
    CLASSES,
    TRAFFIC,
    output_tokens,
    priority_table,
    prompt_tokens,
    queue_s,
    serve,
    speed_table,
    total_tokens,
    wait_table,
)
from kvlab.engine.scheduler.orders import ORDERS


def test_every_order_serves_the_same_requests() -> None:
    few = ["model=qwen3_mini", "workload.num_requests=20", "workload.rate=5000", "workload.output_len.max=90"]
    traffic = serve("heavy-tailed", [*few, "workload.output_len.median=12", "scheduler.max_batch_size=2"])
    assert len(traffic.requests) == 20
    rows = {*ORDERS.names(), *(f"{name}, no aging" for name in AGING)}
    assert set(traffic.results) == rows
    for result in traffic.results.values():
        assert {name: len(record.output_token_ids) for name, record in result.records.items()} == {
            request.request_id: request.sampling.max_tokens for request in traffic.requests
        }
    fcfs, shortest = traffic.results["fcfs"], traffic.results["shortest_first"]
    started = [fcfs.records[request.request_id].scheduled_s for request in traffic.requests]
    assert started == sorted(started, key=lambda time: time or 0.0)
    short, _, _ = traffic.classes(total_tokens)
    assert shortest.percentile(queue_s, short, 100) < fcfs.percentile(queue_s, short, 100)
    for length in (prompt_tokens, output_tokens, total_tokens):
        classes = traffic.classes(length)
        assert sum(map(len, classes)) == 20
        assert max(map(length, classes[0])) < min(map(length, classes[1]))
        assert max(map(length, classes[1])) < min(map(length, classes[2]))
    for table, columns in (
        (speed_table(traffic), 5 + 2 * len(CLASSES)),
        (wait_table(traffic), 3 + 2 * len(CLASSES)),
    ):
        heading, _, *lines = table.splitlines()
        assert {line.split(" | ")[0].removeprefix("| ") for line in lines} == rows
        assert {line.count("|") for line in (heading, *lines)} == {columns + 1}
    assert len(priority_table(traffic).splitlines()) == 2 + 3
    assert set(TRAFFIC) == {"mixed", "heavy-tailed"}
