"""How a step's tokens are shared out among prompts."""

from __future__ import annotations

import pytest

from kvlab.core import Request, SamplingParams
from tests.support.engines import drain
from tests.support.table import TableExecutor, table_engine, table_pool, undisturbed


def asked(number: int, prompt_len: int, max_tokens: int) -> Request:
    first = 1000 * number
    return Request(f"r{number}", tuple(range(first, first + prompt_len)), SamplingParams(max_tokens))


def shares(executor: TableExecutor) -> list[list[int]]:
    return [[tokens for _, tokens in step] for step in executor.steps]


@pytest.mark.parametrize("threshold", [None, 1, 5, 16, 64])
@pytest.mark.parametrize("budget", [8, 9, 23, 64, 512])
@pytest.mark.parametrize("mixed", [True, False])
def test_no_chunk_size_changes_a_token(budget: int, threshold: int | None, mixed: bool) -> None:
    if threshold is not None and threshold > budget:
        pytest.skip("refused")
    executor = TableExecutor()
    engine = table_engine(
        table_pool(60),
        executor,
        max_batched_tokens=budget,
        long_prefill_threshold=threshold,
        mixed=mixed,
        admission_reserve=0.0,
    )
    sequences = [engine.add_request(asked(number, 7 * number + 1, 6)) for number in range(7)]
    records = drain(engine)
    assert [s.output_token_ids for s in sequences] == [undisturbed(s.request) for s in sequences]
    assert executor.errors == []
    assert max(record.prefill_tokens + record.decode_tokens for record in records) <= budget
    if threshold is not None:
        assert max(tokens for step in shares(executor) for tokens in step) <= threshold


def test_a_step_may_compute_less_than_a_block() -> None:
    executor = TableExecutor()
    engine = table_engine(
        table_pool(6, block_size=32), executor, max_batch_size=4, max_batched_tokens=7, admission_reserve=0.0
    )
    sequences = [engine.add_request(asked(number, 11 * number + 1, 9)) for number in range(5)]
    drain(engine)
    assert [s.output_token_ids for s in sequences] == [undisturbed(s.request) for s in sequences]
    assert executor.errors == []


def test_a_long_prompt_leaves_tokens_to_those_behind_it() -> None:
    executor = TableExecutor()
    engine = table_engine(table_pool(60), executor, max_batched_tokens=24, long_prefill_threshold=16)
    for request in (asked(0, 60, 1), asked(1, 8, 1)):
        engine.add_request(request)
    drain(engine)
    assert executor.steps[0] == [("r0", 16), ("r1", 8)]
