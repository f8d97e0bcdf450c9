"""Several samples of one prompt: computed once, forked, and each what it would be alone."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.core import FinishReason, Sequence, StepOutput
from kvlab.engine.core import EngineCore
from kvlab.errors import RequestRefusedError
from kvlab.kv.pool import BlockPool
from tests.support.engines import Aborting, assert_empty, drain, make_engine, request
from tests.support.executors import FailingExecutor
from tests.support.model import expected_tokens
from tests.support.pools import paged_pool, sharing_pool, slotted_pool
from tests.support.records import counted, memory

POOLS = {"paged": paged_pool, "sharing": sharing_pool, "contiguous": slotted_pool}
every_pool = pytest.mark.parametrize("kind", POOLS)


def pool_of(kind: str) -> BlockPool:
    return POOLS[kind]()


def family(sequence: Sequence) -> list[Sequence]:
    return [sequence, *sequence.siblings]


def alone(index: int, **sampling: Any) -> list[int]:
    """The tokens of one sample, in an engine in which no other of its request runs."""
    engine = make_engine(paged_pool(64), max_batch_size=1)
    first = engine.add_request(request("x", 14, 8, n=index + 1, **sampling))
    drain(engine)
    return family(first)[index].output_token_ids


@every_pool
def test_the_prompt_is_computed_once(kind: str) -> None:
    engine = make_engine(pool_of(kind))
    first = engine.add_request(request("x", 14, 8, n=4))
    records = drain(engine)
    assert sum(record.prefill_tokens for record in records) == 14 + 3  # three run its last token again
    assert sum(counted(record).prompt_tokens for record in records) == 14
    assert sum(record.recomputed_tokens for record in records) == 0
    assert [len(s.output_token_ids) for s in family(first)] == [8] * 4


@every_pool
def test_each_is_what_it_would_be_alone(kind: str) -> None:
    engine = make_engine(pool_of(kind))
    sampling: dict[str, Any] = {"seed": 5, "temperature": 4.0}
    first = engine.add_request(request("x", 14, 8, n=4, **sampling))
    drain(engine)
    outputs = [s.output_token_ids for s in family(first)]
    assert outputs == [alone(index, **sampling) for index in range(4)]
    assert len({tuple(output) for output in outputs}) == 4


@every_pool
def test_greedy_samples_are_equal_and_right(kind: str) -> None:
    engine = make_engine(pool_of(kind))
    first = engine.add_request(request("x", 13, 6, n=3))
    drain(engine)
    assert [s.output_token_ids for s in family(first)] == [expected_tokens(first.request)] * 3


def test_pages_of_the_prompt_are_shared_and_the_last_is_copied() -> None:
    engine = make_engine()
    engine.add_request(request("x", 14, 8, n=4, seed=1, temperature=2.0))
    engine.step()
    assert (engine.pool.stats().blocks_in_use, engine.pool.stats().shared_blocks) == (4, 12)
    records = drain(engine)
    assert sum(counted(record).cow_copies for record in records) == 3
    assert max(memory(record).blocks_in_use for record in records) < 4 * 6


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3, 6])
@every_pool
def test_abort_ends_all_of_them_and_returns_every_block(kind: str, steps_before: int) -> None:
    engine = make_engine(pool_of(kind), max_batched_tokens=8)
    outputs: list[StepOutput] = []
    first = engine.add_request(request("x", 14, 8, n=4), outputs.append)
    for _ in range(steps_before):
        engine.step()
    assert engine.abort("x")
    engine.step()
    assert_empty(engine)
    assert not engine.has_work()
    assert [s.finish_reason for s in family(first)] == [FinishReason.ABORTED] * 4
    ends = [output.index for output in outputs if output.finish_reason is not None]
    assert sorted(ends) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["paged", "sharing"])
def test_those_that_find_no_room_queue_and_finish(kind: str) -> None:
    """24 blocks; each of six samples grows to eight."""
    engine = make_engine(pool_of(kind), admission_reserve=0)
    first = engine.add_request(request("x", 14, 18, n=6, seed=3, temperature=1.5))
    other = engine.add_request(request("other", 14, 18))
    drain(engine)
    outputs = [s.output_token_ids for s in family(first)]
    roomy = make_engine(paged_pool(200))
    reference = roomy.add_request(request("x", 14, 18, n=6, seed=3, temperature=1.5))
    drain(roomy)
    assert outputs == [s.output_token_ids for s in family(reference)]
    assert other.output_token_ids == expected_tokens(other.request)


def test_no_more_run_than_may_and_the_rest_come_first() -> None:
    engine = make_engine(slotted_pool(2), max_batch_size=8)
    first = engine.add_request(request("x", 10, 5, n=5))
    other = engine.add_request(request("other", 10, 5))
    records = drain(engine)
    assert max(record.running for record in records) == 2
    assert [s.output_token_ids for s in family(first)] == [expected_tokens(first.request)] * 5
    assert other.scheduled_s is not None
    assert other.output_token_ids == expected_tokens(other.request)


@pytest.mark.parametrize("n", [1, 2, 4])
@every_pool
def test_a_failed_prompt_fails_all_of_them_once(kind: str, n: int) -> None:
    engine = make_engine(pool_of(kind), FailingExecutor("x"))
    outputs: list[StepOutput] = []
    first = engine.add_request(request("x", 14, 8, n=n), outputs.append)
    drain(engine)
    assert [s.finish_reason for s in family(first)] == [FinishReason.FAILED] * n
    assert sorted(output.index for output in outputs) == list(range(n))
    assert not engine.abort("x")


def test_streams_tell_the_samples_apart() -> None:
    engine = make_engine()
    outputs: list[StepOutput] = []
    first = engine.add_request(request("x", 14, 8, n=3, seed=2, temperature=1.5), outputs.append)
    drain(engine)
    for sequence in family(first):
        mine = [output for output in outputs if output.index == sequence.index]
        assert [output.token_id for output in mine] == sequence.output_token_ids
        assert [output.finish_reason for output in mine] == [None] * 7 + [FinishReason.LENGTH]


def test_a_reader_that_aborts_at_the_first_token_ends_all_of_them() -> None:
    engine: EngineCore = make_engine()
    first = engine.add_request(request("x", 14, 8, n=3), Aborting(engine, "x"))
    drain(engine)
    assert [s.finish_reason for s in family(first)] == [FinishReason.ABORTED] * 3


@pytest.mark.parametrize("n", [0, -1])
def test_fewer_than_one_is_refused(n: int) -> None:
    engine = make_engine()
    with pytest.raises(RequestRefusedError, match=f"n={n}; at least 1 sample"):
        engine.add_request(request("x", 4, 4, n=n))
    assert not engine.has_work()
