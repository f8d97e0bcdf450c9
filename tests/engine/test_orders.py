"""Each order does what its name says, and gives every request the tokens it would have had alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlab.config import PreemptionConfig
from kvlab.core import FinishReason, Request, SamplingParams
from kvlab.engine.core import EngineCore
from kvlab.engine.scheduler.orders import ORDERS
from kvlab.errors import RequestRefusedError
from tests.support.engines import drain
from tests.support.table import TableExecutor, table_engine, table_pool, table_slots, undisturbed


def asked(name: str, prompt_len: int, max_tokens: int, priority: int = 0) -> Request:
    first = sum(map(ord, name)) * 100
    return Request(name, tuple(range(first, first + prompt_len)), SamplingParams(max_tokens), priority=priority)


def names(executor: TableExecutor) -> list[list[str]]:
    return [[name for name, _ in step] for step in executor.steps]


def first_steps(executor: TableExecutor) -> list[str]:
    """Requests in the order in which they first took part."""
    return list(dict.fromkeys(name for step in names(executor) for name in step))


def serve(engine: EngineCore, *requests: Request) -> None:
    sequences = [engine.add_request(each) for each in requests]
    drain(engine)
    for sequence in sequences:
        assert sequence.finish_reason is FinishReason.LENGTH
        assert sequence.output_token_ids == undisturbed(sequence.request)


@pytest.mark.parametrize("order", ORDERS.names())
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("pool", ["paged", "sharing", "contiguous"])
def test_no_order_changes_a_token(order: str, mixed: bool, pool: str) -> None:
    executor = TableExecutor()
    memory = table_slots(3) if pool == "contiguous" else table_pool(24, sharing=pool == "sharing")
    engine = table_engine(
        memory, executor, order=order, mixed=mixed, max_decode_seqs=2, max_batched_tokens=16, admission_reserve=0.0
    )
    serve(engine, *(asked(f"r{index}", 3 + 5 * (index % 4), 20, index % 3) for index in range(9)))
    assert executor.errors == []


class TestShortestFirst:
    def test_a_later_request_overtakes_in_the_queue_and_not_in_the_batch(self) -> None:
        executor = TableExecutor()
        engine = table_engine(table_pool(40), executor, order="shortest_first", max_batched_tokens=8)
        engine.add_request(asked("long", 30, 2))
        engine.add_request(asked("other", 30, 2))
        engine.step()
        serve(engine, asked("short", 8, 2))
        assert executor.steps[:5] == [
            *[[("long", 8)]] * 3,
            [("long", 6), ("short", 2)],
            [("long", 1), ("short", 6), ("other", 1)],
        ]


class TestPriority:
    def test_the_lowest_number_first_then_by_arrival(self) -> None:
        executor = TableExecutor()
        engine = table_engine(table_pool(40), executor, order="priority", max_batch_size=1)
        serve(engine, asked("a", 4, 2, 5), asked("b", 4, 2, 0), asked("c", 4, 2, 5), asked("d", 4, 2, -1))
        assert first_steps(executor) == ["d", "b", "a", "c"]

    def test_one_that_arrives_later_still_goes_before(self) -> None:
        executor = TableExecutor()
        engine = table_engine(table_pool(40), executor, order="priority", max_batch_size=1)
        engine.add_request(asked("running", 4, 4, 9))
        engine.step()
        engine.add_request(asked("waiting", 4, 2, 1))
        engine.step()
        serve(engine, asked("urgent", 4, 2, 0))
        assert first_steps(executor) == ["running", "urgent", "waiting"]


class TestLongestPrefix:
    def test_the_one_that_finds_most_in_the_cache_goes_first_then_by_arrival(self) -> None:
        executor = TableExecutor()
        engine = table_engine(
            table_pool(60, sharing=True), executor, order="longest_prefix", max_batch_size=1, max_batched_tokens=64
        )
        known = tuple(range(5000, 5032))
        serve(engine, Request("known", known, SamplingParams(1)))
        serve(
            engine,
            asked("new", 20, 2),
            Request("half", known[:16] + tuple(range(100)), SamplingParams(2)),
            Request("most", (*known, 7), SamplingParams(2)),
            asked("new too", 8, 2),
        )
        assert first_steps(executor) == ["known", "most", "half", "new", "new too"]

    def test_a_preempted_sequence_goes_before_all(self) -> None:
        executor = TableExecutor()
        engine = table_engine(
            table_pool(12, sharing=True), executor, order="longest_prefix", admission_reserve=0.0, max_batch_size=2
        )
        first, second = engine.add_request(asked("a", 20, 12)), engine.add_request(asked("b", 20, 12))
        while not second.preemptions:
            engine.step()
        cached = engine.add_request(Request("cached", first.request.prompt_token_ids, SamplingParams(2)))
        drain(engine)
        assert second.resumed_s
        passes = names(executor)
        alone = next(index for index, each in enumerate(passes) if each == ["a"])
        assert next(name for each in passes[alone:] for name in each if name != "a") == "b"
        assert cached.output_token_ids == undisturbed(cached.request)

    def test_compares_the_first_sequences_of_a_long_queue_alone(self) -> None:
        """So that a step costs the same however many wait."""
        engine = table_engine(table_pool(60, sharing=True), order="longest_prefix", max_batch_size=1)
        queried = 0
        prefix_tokens = engine.pool.prefix_tokens

        def counted(token_ids: list[int], salt: str | int | None = None) -> int:
            nonlocal queried
            queried += 1
            return prefix_tokens(token_ids, salt)

        engine.pool.prefix_tokens = counted  # type: ignore[method-assign, assignment]
        for index in range(200):
            engine.add_request(asked(f"r{index}", 4, 2))
        engine.step()
        assert queried == 64
        engine.step()  # no room: nothing to choose
        assert queried == 64


class TestDeadline:
    def test_the_earliest_first(self) -> None:
        executor = TableExecutor()
        engine = table_engine(table_pool(40), executor, order="deadline", max_batch_size=1, default_deadline_s=10.0)
        due = {"late": (0.0, 30.0), "none": (1.0, None), "soon": (2.0, 5.0), "tie": (3.0, 4.0)}
        serve(
            engine,
            *(replace(asked(name, 4, 2), arrival_s=at, deadline_s=slack) for name, (at, slack) in due.items()),
        )
        assert first_steps(executor) == ["soon", "tie", "none", "late"]

    @pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), True, "soon", 10**400])
    def test_a_deadline_that_is_not_behind_the_arrival_is_refused(self, wrong: float) -> None:
        engine = table_engine(table_pool(40))
        with pytest.raises(
            RequestRefusedError, match=f"deadline_s={repr(wrong)[:100]}.*; must be seconds, more than 0"
        ):
            engine.add_request(replace(asked("a", 4, 2), deadline_s=wrong))


class TestAging:
    """What waiting makes up for: a level of priority, or 1,000 tokens, for each `aging_s`."""

    @pytest.mark.parametrize(("later_s", "goes_first"), [(19.9, "urgent"), (20.1, "patient")])
    def test_one_of_worse_priority_is_overtaken_by_those_that_come_soon_after(
        self, later_s: float, goes_first: str
    ) -> None:
        executor = TableExecutor()
        engine = table_engine(table_pool(40), executor, order="priority", max_batch_size=1, aging_s=10.0)
        patient = asked("patient", 4, 2, priority=2)
        urgent = replace(asked("urgent", 4, 2, priority=0), arrival_s=later_s)
        serve(engine, patient, urgent)
        assert first_steps(executor)[0] == goes_first

    @pytest.mark.parametrize(("later_s", "goes_first"), [(0.9, "short"), (1.1, "long")])
    def test_a_long_one_is_overtaken_by_short_ones_that_come_soon_after(
        self, later_s: float, goes_first: str
    ) -> None:
        executor = TableExecutor()
        engine = table_engine(table_pool(80), executor, order="shortest_first", max_batch_size=1, aging_s=10.0)
        serve(engine, asked("long", 100, 10), replace(asked("short", 4, 6), arrival_s=later_s))
        assert first_steps(executor)[0] == goes_first

    @pytest.mark.parametrize(("later_s", "goes_first"), [(0.31, "known too"), (0.33, "new")])
    def test_a_new_prompt_is_overtaken_by_cached_ones_that_come_soon_after(
        self, later_s: float, goes_first: str
    ) -> None:
        executor = TableExecutor()
        engine = table_engine(
            table_pool(40, sharing=True), executor, order="longest_prefix", max_batch_size=1, aging_s=10.0
        )
        known = asked("known", 32, 1)
        serve(engine, known)
        again = Request("known too", (*known.prompt_token_ids, 1), SamplingParams(1), arrival_s=later_s)
        serve(engine, asked("new", 20, 1), again)
        assert first_steps(executor)[1] == goes_first

    def test_can_be_switched_off(self) -> None:
        executor = TableExecutor()
        engine = table_engine(table_pool(40), executor, order="priority", max_batch_size=1, aging_s=None)
        serve(engine, asked("patient", 4, 2, 1), replace(asked("urgent", 4, 2), arrival_s=1e9))
        assert first_steps(executor) == ["urgent", "patient"]


class TestPrefillFirst:
    def test_an_admission_leaves_decoding_sequences_the_blocks_of_their_next_token(self) -> None:
        """Six blocks of 4: two sequences at the end of their first block; a third that needs four has to wait."""
        executor = TableExecutor()
        engine = table_engine(table_pool(6), executor, order="prefill_first", admission_reserve=0.0)
        for name in "ab":
            engine.add_request(asked(name, 4, 3))
        engine.step()
        large = engine.add_request(asked("large", 16, 1))
        drain(engine)
        assert names(executor) == [["a", "b"]] * 3 + [["large"]]
        assert large.preemptions == 0

    def test_a_sequence_preempted_after_its_chunk_was_planned_is_not_in_the_step(self) -> None:
        executor = TableExecutor()
        engine = table_engine(
            table_pool(8), executor, order="prefill_first", long_prefill_threshold=4, admission_reserve=0.0
        )
        decodes = engine.add_request(asked("decodes", 4, 20))
        engine.step()
        prefills = engine.add_request(asked("prefills", 24, 3))
        while not prefills.preemptions:
            engine.step()
        assert names(executor)[-2:] == [["prefills", "decodes"], ["decodes"]]
        drain(engine)
        for sequence in (decodes, prefills):
            assert sequence.output_token_ids == undisturbed(sequence.request)


class TestDecodeRoundRobin:
    def test_prefill_has_what_they_leave(self) -> None:
        executor = TableExecutor()
        engine = table_engine(
            table_pool(60), executor, order="decode_round_robin", max_decode_seqs=2, max_batched_tokens=12
        )
        for name in "abc":
            engine.add_request(asked(name, 4, 6))
        engine.step()
        serve(engine, asked("prompt", 20, 2))
        assert executor.steps[1:3] == [
            [("a", 1), ("b", 1), ("prompt", 10)],
            [("c", 1), ("a", 1), ("prompt", 10)],
        ]


class TestTwoPasses:
    """mixed=False: the same schedule, decode and prefill computed one after the other."""

    def test_the_same_step_in_two_passes(self) -> None:
        passes = {}
        for mixed in (True, False):
            executor = TableExecutor()
            engine = table_engine(table_pool(60), executor, mixed=mixed, max_batched_tokens=8)
            engine.add_request(asked("decodes", 4, 4))
            engine.step()
            engine.add_request(asked("prompt", 10, 2))
            records = drain(engine)
            passes[mixed] = executor.steps
            assert (records[0].batch_seqs, records[0].decode_tokens, records[0].prefill_tokens) == (2, 1, 7)
        assert passes[True][1] == [("decodes", 1), ("prompt", 7)]
        assert passes[False][1:3] == [[("decodes", 1)], [("prompt", 7)]]

    def test_prefill_comes_first_under_prefill_first(self) -> None:
        executor = TableExecutor()
        engine = table_engine(table_pool(60), executor, mixed=False, order="prefill_first")
        engine.add_request(asked("decodes", 4, 4))
        engine.step()
        serve(engine, asked("prompt", 10, 2))
        assert executor.steps[1:3] == [[("prompt", 10)], [("decodes", 1)]]


def test_a_preempted_sequence_is_the_first_of_its_rank_only() -> None:
    """Under `priority` one that is more urgent goes before it."""
    executor = TableExecutor()
    engine = table_engine(
        table_pool(12),
        executor,
        order="priority",
        preemption=PreemptionConfig("last_admitted"),
        admission_reserve=0.0,
        max_batch_size=2,
        max_batched_tokens=64,
    )
    first, second = engine.add_request(asked("a", 20, 12, 1)), engine.add_request(asked("b", 20, 12, 1))
    equal = engine.add_request(asked("equal", 20, 2, 1))
    while not second.preemptions:
        engine.step()
    urgent = engine.add_request(replace(asked("urgent", 20, 2), priority=0))
    drain(engine)
    assert list(engine.scheduler.waiting) == []
    assert first.preemptions == 0
    assert urgent.scheduled_s is not None
    order = first_steps(executor)
    assert order.index("urgent") < order.index("equal")
    resumed = max(index for index, step in enumerate(names(executor)) if "urgent" in step)
    assert all("b" not in step for step in names(executor)[names(executor).index(["a"]) : resumed])
    assert equal.output_token_ids == undisturbed(equal.request)
    assert second.output_token_ids == undisturbed(second.request)
