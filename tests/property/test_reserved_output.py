"""With scheduler.reserve_output nobody is preempted, and nothing is reserved that nobody takes."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvlab.core import FinishReason, Request, SamplingParams
from kvlab.engine.scheduler.orders import ORDERS
from kvlab.kv.groups import LayerGroup
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.storage import KVStorage
from tests.property.test_pool_machine import examples
from tests.support.engines import drain
from tests.support.table import SPEC, table_engine, table_pool, table_slots

_LONGEST = 96


@st.composite
def pools(draw: st.DrawFn) -> BlockPool:
    """Of slots, of blocks, or of blocks beside which a group of layers has a sliding window."""
    blocks, size = draw(st.integers(4, 40)), draw(st.sampled_from([1, 2, 3, 4, 8]))
    sharing, window = draw(st.booleans()), draw(st.sampled_from([None, None, 3, 8, 16]))
    if draw(st.integers(0, 5)) == 0:
        return table_slots(draw(st.integers(1, 4)), _LONGEST)
    if window is None:
        return table_pool(blocks, size, max_seq_len=_LONGEST, sharing=sharing)
    return _windowed(blocks, size, window, sharing)


def _windowed(blocks: int, size: int, window: int, sharing: bool) -> BlockPool:
    groups = LayerGroup((0,)), LayerGroup((1,), window)
    storage = KVStorage(SPEC, blocks, size)
    return PagedKVCachePool(blocks, size, _LONGEST, storage, prefix_sharing=sharing, groups=groups, step_tokens=16)


def _request(number: int, prompt: int, output: int, samples: int, same: int = 0) -> Request:
    """`same` tokens of its prompt are those of the others too."""
    own = range(1000 * (number + 1), 1000 * (number + 1) + prompt - min(same, prompt - 1))
    return Request(f"r{number}", (*range(min(same, prompt - 1)), *own), SamplingParams(output, n=samples))


_asks = st.tuples(
    st.integers(1, 30), st.integers(1, 12), st.sampled_from([1, 1, 2, 3, 5]), st.sampled_from([0, 0, 12])
)


@examples(150)
@example([(7, 9, 3, 12), (1, 8, 3, 0)], _windowed(27, 4, 3, True), 8, "fcfs")  # samples share what leaves a window
@given(st.lists(_asks, min_size=1, max_size=7), pools(), st.integers(1, 8), st.sampled_from(ORDERS.names()))
def test_none_is_preempted_and_all_that_fit_alone_end(
    asked: list[tuple[int, int, int, int]], pool: BlockPool, most: int, order: str
) -> None:
    engine = table_engine(
        pool, reserve_output=True, admission_reserve=0, max_batch_size=most, max_batched_tokens=16, order=order
    )
    requests = [_request(number, *ask) for number, ask in enumerate(asked)]
    firsts = [engine.add_request(each) for each in requests if each.max_total_tokens <= pool.max_sequence_tokens]
    assert not any(record.preempted for record in drain(engine))
    sequences = [sequence for first in firsts for sequence in (first, *first.siblings)]
    assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in sequences)


@examples(100)
@given(
    prompt=st.integers(1, 13),
    output=st.sampled_from([1, 1, 2, 3, 5, 9]),
    samples=st.integers(1, 4),
    size=st.integers(1, 5),
    count=st.integers(2, 3),
    order=st.sampled_from(["fcfs", "prefill_first"]),
    lacking=st.booleans(),
)
def test_requests_that_fit_exactly_are_admitted_together(
    prompt: int, output: int, samples: int, size: int, count: int, order: str, lacking: bool
) -> None:
    """The first sample ends with blocks for all tokens but the last, which nobody computes. Each other has of its
    own what is behind the prompt's full blocks, with a copy of the block that the prompt begins, if it writes any.
    """
    whole = -(-(prompt + output - 1) // size)
    needed = whole + (samples - 1) * (whole - prompt // size if output > 1 else 0)
    pool = table_pool(count * needed - lacking, size, max_seq_len=_LONGEST)
    engine = table_engine(
        pool, reserve_output=True, admission_reserve=0, max_batch_size=16, max_batched_tokens=64, order=order
    )
    requests = [_request(number, prompt, output, samples) for number in range(count)]
    if requests[0].max_total_tokens > pool.max_sequence_tokens:
        return
    for each in requests:
        engine.add_request(each)
    first = engine.step()
    assert first is not None
    assert sum(sequence.index == 0 for sequence in engine.scheduler.running) == count - lacking
    records = [first, *drain(engine)]
    assert not any(record.preempted for record in records)
    # All samples are forked at once: each runs the prompt's last token again, and none computes the prompt.
    assert sum(record.prefill_tokens for record in records) == count * (prompt + samples - 1)


@pytest.mark.parametrize("order", ["fcfs", "prefill_first"])
def test_a_block_that_the_step_takes_is_reserved_once(order: str) -> None:
    """Of 4 + 5 tokens 8 are stored: two blocks. When the second request comes, the first takes its other block."""
    engine = table_engine(
        table_pool(4, max_seq_len=_LONGEST), reserve_output=True, admission_reserve=0, order=order
    )
    for number in range(2):
        engine.add_request(_request(number, 4, 5, 1))
        engine.step()
    assert len(engine.scheduler.running) == 2
    assert not any(record.preempted for record in drain(engine))


def test_samples_that_cannot_run_at_once_are_not_reserved_for() -> None:
    """Both requests store 8 tokens, in two blocks. Of the second's samples one runs at a time beside its first."""
    engine = table_engine(
        table_pool(5, max_seq_len=_LONGEST), reserve_output=True, admission_reserve=0, max_batch_size=2
    )
    for number, samples in enumerate([1, 4]):
        engine.add_request(_request(number, 4, 5, samples))
    engine.step()
    assert len(engine.scheduler.running) == 2
    assert not any(record.preempted for record in drain(engine))
