"""Whatever comes, in whatever memory, under whatever policy: each request ends once, with its own tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.config import FaultsConfig, PreemptionConfig, SchedulerConfig, SpeculationConfig
from kvlab.core import FinishReason, Request, SamplingParams, Sequence, StepOutput
from kvlab.engine.core import EngineCore
from kvlab.engine.scheduler.orders import ORDERS
from kvlab.engine.scheduler.victims import VICTIMS
from kvlab.engine.step_plan import DecodeBatch
from kvlab.errors import RequestRefusedError
from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.pool import BlockPool
from tests.property.test_pool_machine import examples
from tests.support.engines import assert_empty
from tests.support.table import TableExecutor, oracle, table_engine, table_pool, table_slots, undisturbed


@pytest.fixture(autouse=True, scope="module")
def speculating() -> Iterator[None]:
    with oracle():
        yield


_SYSTEM = tuple(range(40))
_MANY = 4000  # steps


@dataclass
class Ask:
    """A request as it is drawn: `same` of its prompt tokens are those that others have too."""

    prompt: int
    output: int
    same: int
    priority: int
    deadline_s: float | None
    samples: int
    gap: int  # steps ahead of its arrival
    aborted_after: int | None  # steps
    ends_after: int | None  # tokens of its output, where it asks for more

    def request(self, number: int) -> Request:
        own = tuple(range(1000 * (number + 1), 1000 * (number + 1) + self.prompt))
        prompt = _SYSTEM[: self.same] + own
        sampling = SamplingParams(self.output, n=self.samples)
        urgency, ends = (self.priority, self.deadline_s), self.ends_after
        return Request(
            f"r{number}", prompt, sampling, priority=urgency[0], deadline_s=urgency[1], output_tokens=ends
        )


asks = st.builds(
    Ask,
    prompt=st.integers(1, 30),
    output=st.integers(1, 14),
    same=st.sampled_from([0, 0, 8, 17, 40]),
    priority=st.integers(0, 2),
    deadline_s=st.sampled_from([None, 1.0, 5.0, 100.0]),
    samples=st.sampled_from([1, 1, 1, 1, 3]),
    gap=st.integers(0, 4),
    aborted_after=st.sampled_from([None, None, None, None, 0, 1, 3, 8]),
    ends_after=st.sampled_from([None, None, 1, 4]),
)


@st.composite
def schedulers(draw: st.DrawFn) -> SchedulerConfig:
    size = draw(st.integers(1, 6))
    budget = size + draw(st.integers(0, 40))
    reserve, watermark = draw(st.sampled_from([0.0, 0.2, 0.9])), draw(st.sampled_from([0.0, 0.0, 0.1, 0.6]))
    common: dict[str, Any] = {
        "max_batch_size": size,
        "max_batched_tokens": budget,
        "max_wait_ms": 0.0,
        "admission_reserve": reserve,
        "watermark": watermark,
        "mixed": draw(st.booleans()),
        "ahead": draw(st.booleans()),
        "long_prefill_threshold": draw(st.none() | st.integers(1, budget)),
        "max_waiting_requests": draw(st.none() | st.integers(1, 5)),
        "speculation": SpeculationConfig(
            draw(st.sampled_from([None, None, "ngram", "oracle", "oracle"])), draw(st.integers(1, 7)), 1, 3
        ),
    }
    if draw(st.integers(0, 5)) == 0:
        return SchedulerConfig(policy="static", **common)
    reserves = draw(st.none() | st.booleans())
    ratio = draw(st.sampled_from([None, 0.1, 1.0])) if reserves else None
    longest = common["long_prefill_threshold"] or budget
    return SchedulerConfig(
        order=draw(st.sampled_from(ORDERS.names())),
        max_decode_seqs=draw(st.integers(1, 4)),
        reserve_output=reserves,
        conservativeness=ratio,
        chunk_unit=None if ratio else draw(st.sampled_from([None, None, 1, min(4, longest), longest])),
        preemption=PreemptionConfig(draw(st.sampled_from(VICTIMS.names()))),
        **common,
    )


@st.composite
def pools(draw: st.DrawFn) -> BlockPool:
    if draw(st.integers(0, 4)) == 0:
        return table_slots(draw(st.integers(1, 4)), 96)
    return table_pool(
        draw(st.integers(6, 40)),
        draw(st.sampled_from([1, 3, 4, 8])),
        max_seq_len=96,
        sharing=draw(st.booleans()),
        eviction=draw(st.sampled_from(EVICTION_POLICIES.names())),
    )


def columns(batch: DecodeBatch) -> list[object]:
    return [
        batch.slots.tolist(),
        batch.last_tokens.tolist(),
        batch.num_outputs.tolist(),
        batch.num_known,
        batch.specs,
    ]


@dataclass
class Watched:
    """An engine whose admissions and columns are checked: the sequence admitted is the one that its order puts
    first, and the columns of those that decode are up to date.
    """

    engine: EngineCore
    outputs: list[StepOutput] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        scheduler, admit = self.engine.scheduler, self.engine.scheduler.admit
        came: dict[Sequence, int] = {}
        tickets = count()
        goes_last = scheduler.config.conservativeness is not None  # a sequence that was preempted

        def note() -> None:
            for waiting in [*self.sequences, *scheduler.waiting]:
                if waiting not in came:
                    came[waiting] = next(tickets)

        def rank(sequence: Sequence) -> tuple[float, bool, int]:
            request, order = sequence.request, scheduler.config.order
            first = {
                "priority": request.priority,
                "shortest_first": request.max_total_tokens,
                "deadline": request.deadline_s or scheduler.config.default_deadline_s,
            }.get(order, 0)
            again = not goes_last if sequence.preemptions else sequence.index > 0  # put to the front
            if order == "longest_prefix" and not again:
                first = -scheduler._state.cached_tokens(sequence)
            elif order == "longest_prefix":
                first = -math.inf
            return first, not again, 0 if again else came[sequence]

        def watched(sequence: Sequence, *, is_loading: bool = False) -> None:
            note()
            if scheduler.config.chunk_unit is None:  # others may wait for blocks that the step computes
                assert rank(sequence) == min(map(rank, scheduler.waiting))
            admit(sequence, is_loading=is_loading)

        plan_decode, preempt = scheduler.plan_decode, scheduler.preempt

        def preempted(sequence: Sequence) -> None:
            preempt(sequence)
            note()
            if goes_last:
                came[sequence] = next(tickets)

        def checked(budget: int) -> DecodeBatch:
            batch = plan_decode(budget)
            assert columns(batch) == columns(DecodeBatch(batch.sequences))
            assert all(sequence.is_decoding for sequence in batch.sequences)
            return batch

        scheduler.admit = watched  # type: ignore[method-assign]
        scheduler.preempt = preempted  # type: ignore[method-assign]
        scheduler.plan_decode = checked  # type: ignore[method-assign]

    def submit(self, request: Request) -> None:
        try:
            first = self.engine.add_request(request, self.outputs.append)
        except RequestRefusedError:
            return
        self.sequences += [first, *first.siblings]

    def step(self) -> None:
        record = self.engine.step()
        assert self.engine.pool.audit() == []
        config = self.engine.scheduler.config
        assert len(self.engine.scheduler.running) <= config.max_batch_size
        if record is not None:
            assert record.prefill_tokens + record.decode_tokens <= config.max_batched_tokens
            if config.order == "decode_round_robin":
                assert record.decode_tokens - record.proposed_tokens <= config.max_decode_seqs


def play(asked: list[Ask], pool: BlockPool, config: SchedulerConfig, faults: FaultsConfig | None) -> Watched:
    """Let the requests come and go, to the end; checks what has to hold in each step and at the end."""
    executor = TableExecutor()
    watched = Watched(table_engine(pool, executor, faults=faults, **vars(config)))
    aborts: Counter[int] = Counter()
    now = 0
    for number, ask in enumerate(asked):
        for _ in range(ask.gap):
            watched.step()
            now += 1
            _abort_due(watched, aborts, now)
        watched.submit(ask.request(number))
        if ask.aborted_after is not None:
            aborts[number] = now + ask.aborted_after + 1
    for _ in range(_MANY):
        if not watched.engine.has_work():
            break
        watched.step()
        now += 1
        _abort_due(watched, aborts, now)
    assert not watched.engine.has_work()
    assert_empty(watched.engine)
    assert executor.errors == []
    _check_outputs(watched)
    return watched


def _abort_due(watched: Watched, aborts: Counter[int], now: int) -> None:
    for number, when in list(aborts.items()):
        if now >= when:
            watched.engine.abort(f"r{number}")
            del aborts[number]


def _check_outputs(watched: Watched) -> None:
    for sequence in watched.sequences:
        mine = [
            output
            for output in watched.outputs
            if (output.request_id, output.index) == (sequence.request.request_id, sequence.index)
        ]
        assert [output.finish_reason for output in mine if output.finish_reason] == [sequence.finish_reason]
        assert mine[-1].finish_reason is sequence.finish_reason
        tokens = [output.token_id for output in mine if output.token_id is not None]
        request = sequence.request
        expected = undisturbed(request, sequence.index)[: request.expected_tokens]
        assert tokens == sequence.output_token_ids == expected[: len(tokens)]
        if sequence.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
            assert tokens == expected
            is_cut = request.expected_tokens == request.sampling.max_tokens
            assert sequence.finish_reason is (FinishReason.LENGTH if is_cut else FinishReason.STOP)


@examples(110)
@given(st.lists(asks, min_size=1, max_size=9), pools(), schedulers())
def test_any_load_in_any_memory_under_any_policy(
    asked: list[Ask], pool: BlockPool, config: SchedulerConfig
) -> None:
    watched = play(asked, pool, config, None)
    for sequence in watched.sequences:
        assert sequence.finish_reason in (FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORTED)


@examples(60)
@given(
    st.lists(asks, min_size=1, max_size=9),
    pools(),
    schedulers(),
    st.builds(
        FaultsConfig, st.sampled_from(["forward", "sampler", "sequence", "any"]), st.just(0.15), st.integers(0, 99)
    ),
)
def test_with_faults_the_healthy_get_their_tokens_and_nothing_is_lost(
    asked: list[Ask], pool: BlockPool, config: SchedulerConfig, faults: FaultsConfig
) -> None:
    play(asked, pool, config, faults)


@examples(35)
@given(st.lists(asks, min_size=1, max_size=9), pools(), schedulers())
def test_without_preemption_what_fits_ends_and_what_does_not_fails(
    asked: list[Ask], pool: BlockPool, config: SchedulerConfig
) -> None:
    if config.policy == "static":
        return
    config.preemption, config.on_exhaustion = PreemptionConfig(), "fail"
    watched = play(asked, pool, config, None)
    for sequence in watched.sequences:
        assert sequence.preemptions == 0
        if sequence.finish_reason is FinishReason.FAILED:
            assert "did not fit" in (sequence.error or "")
            assert not config.reserves_output or config.conservativeness is not None
