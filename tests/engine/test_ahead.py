"""When a step is decided: with the one before, or once prompts have waited for more of them."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.config import KVConfig, SchedulerConfig
from kvlab.core import FinishReason, Request, RequestRecord, SamplingParams, StepRecord
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.clock import LogicalClock
from kvlab.errors import ConfigError
from tests.simulation.test_executor import config
from tests.support.model import prompt_for
from tests.support.table import TableExecutor, table_engine, table_pool


def steps(
    arrivals: dict[str, float],
    outputs: dict[str, int] | None = None,
    blocks: int = 60,
    *,
    asked: int | None = None,
    **scheduler: Any,
) -> list[str]:
    """Who takes part in each step of a second, when `a` decodes from 0 on and others arrive. Requests ask for as
    many tokens as their `outputs` have, or for those `asked` for.
    """
    executor, clock = TableExecutor(), LogicalClock()
    engine = table_engine(table_pool(blocks), executor, clock, **scheduler)
    due = {"a": 0.0, **arrivals}
    for _ in range(8):
        for name, arrival_s in list(due.items()):
            if arrival_s <= clock.now():
                prompt = tuple(range(100 * ord(name), 100 * ord(name) + 4))
                output = (outputs or {}).get(name, 8)
                sampling = SamplingParams(asked or output)
                engine.submit(Request(name, prompt, sampling, arrival_s=arrival_s, output_tokens=output))
                del due[name]
        engine.step()
        clock.advance(1.0)
    return ["".join(name for name, _ in step) for step in executor.steps]


class TestAhead:
    def test_what_arrives_in_a_step_takes_part_in_the_next_but_one(self) -> None:
        assert steps({"b": 1.5})[:4] == ["a", "a", "ab", "ab"]
        assert steps({"b": 1.5}, ahead=True)[:4] == ["a", "a", "a", "ab"]

    def test_what_arrives_as_a_step_begins_is_too_late_for_the_one_being_decided(self) -> None:
        assert steps({"b": 1.0}, ahead=True)[:4] == ["a", "a", "a", "ab"]

    def test_what_a_step_was_too_small_for_is_known_to_the_next(self) -> None:
        assert steps({"b": 0.0, "c": 0.0}, ahead=True, max_batched_tokens=8)[:3] == ["ab", "abc", "abc"]

    def test_what_comes_from_a_tier_for_one_that_was_aborted_is_not_waited_for(self) -> None:
        """It has its memory for one step more, in which its load gets done."""
        scheduler = SchedulerConfig(max_batch_size=4, ahead=True)
        kv = KVConfig(num_blocks=16, block_size=4, offload="1MiB")
        engine, records = (
            build_engine(plan_engine(config("simulated", kv=kv, scheduler=scheduler))),
            list[RequestRecord](),
        )
        for name, prompt, tokens in (("first", "same", 33), ("evicts it", "other", 61)):
            engine.submit(Request(name, prompt_for(prompt, tokens), SamplingParams(2)), on_finish=records.append)
            while engine.has_work():
                engine.step()
        engine.submit(Request("beside", prompt_for("beside", 3), SamplingParams(24)), on_finish=records.append)
        engine.step()
        engine.submit(Request("again", prompt_for("same", 33), SamplingParams(2)), on_finish=records.append)
        while (there_s := engine.pool.next_arrival()) is None:
            engine.step()
        engine.clock.wait_until(there_s)
        assert engine.abort("again")
        while engine.has_work():
            engine.step()
        assert [record.finish_reason for record in records[2:]] == [FinishReason.ABORTED, FinishReason.LENGTH]
        assert engine.audit() == []

    def test_what_ended_in_a_step_makes_room_in_the_next_but_one(self) -> None:
        late, short = {"b": 0.0, "c": 0.0}, {"b": 3}
        assert steps(late, short, max_batch_size=2)[:5] == ["ab", "ab", "ab", "ac", "ac"]
        assert steps(late, short, max_batch_size=2, ahead=True)[:5] == ["ab", "ab", "ab", "a", "ac"]

    def test_what_ended_makes_room_at_once_where_nothing_else_runs(self) -> None:
        assert steps({"b": 0.0}, {"a": 3}, max_batch_size=1, ahead=True)[:4] == ["a", "a", "a", "b"]

    def test_what_ended_gives_up_its_memory_before_anyone_is_preempted(self) -> None:
        found = steps({"b": 0.0, "c": 0.0}, {"b": 5}, 4, max_batch_size=2, ahead=True, admission_reserve=0)
        assert found[:8] == ["ab", "ab", "ab", "ab", "ab", "a", "ac", "a"]  # `c` finds one block, and needs another

    def test_what_ended_gives_up_its_memory_before_anyone_fails(self) -> None:
        found = steps({"b": 0.0}, {"b": 5}, 4, ahead=True, admission_reserve=0, on_exhaustion="fail")
        assert found[:8] == ["ab", "ab", "ab", "ab", "ab", "a", "a", "a"]

    @pytest.mark.parametrize("output", [1, 3])
    def test_what_a_stop_ended_decodes_once_more(self, output: int) -> None:
        """That it would was not known when the coming step was decided, but for the longest output."""
        beside, short, both = {"b": 0.0}, {"b": output}, ["ab"] * output
        assert steps(beside, short, asked=8, ahead=True)[: output + 2] == [*both, "ab", "a"]
        assert steps(beside, short, ahead=True)[: output + 1] == [*both, "a"]
        assert steps(beside, short, asked=8)[: output + 1] == [*both, "a"]

    def test_a_step_of_nobody_but_what_has_ended_runs_too(self) -> None:
        assert steps({}, {"a": 2}, asked=8, ahead=True) == ["a", "a", "a"]

    def test_what_decodes_in_vain_gets_nothing(self) -> None:
        engine = table_engine(table_pool(60), TableExecutor(), LogicalClock(), ahead=True)
        records: list[RequestRecord] = []
        for name, output in (("a", 7), ("b", 3), ("c", 1)):
            first = 100 * ord(name)
            request = Request(name, tuple(range(first, first + 4)), SamplingParams(9), output_tokens=output)
            engine.submit(request, on_finish=records.append)
        taken: list[StepRecord] = []
        while engine.has_work():
            taken += filter(None, [engine.step()])
        assert [len(record.output_token_ids) for record in records] == [1, 3, 7]
        assert engine.stats().output_tokens == sum(step.output_tokens for step in taken) == 11
        # 3 first tokens come from prompts, and each request decodes once in vain
        assert sum(step.decode_tokens for step in taken) == 11
        assert engine.audit() == []

    def test_what_decodes_in_vain_gives_up_its_memory_before_anyone_fails(self) -> None:
        """`b` has filled a block with its last token, and would need another."""
        found = steps({"b": 0.0}, {"b": 5}, 4, asked=8, ahead=True, admission_reserve=0, on_exhaustion="fail")
        assert found == ["ab", "ab", "ab", "ab", "ab", "a", "a", "a"]

    def test_what_decodes_in_vain_gets_nothing_where_the_least_important_lacks_memory(self) -> None:
        """`a` has ended as `b`, which came last, finds no block."""
        found = steps({"b": 0.0}, {"a": 5}, 5, asked=8, ahead=True, admission_reserve=0, order="priority")
        assert found[:8] == ["ab", "ab", "ab", "ab", "ab", "a", "b", "b"]

    def test_an_idle_engine_takes_it_at_once(self) -> None:
        assert steps({}, ahead=True)[0] == "a"


class TestPrefillWait:
    def test_prompts_wait_for_so_many_steps(self) -> None:
        assert steps({"b": 1.0}, prefill_wait_steps=3)[:6] == ["a", "a", "a", "a", "ab", "ab"]

    def test_enough_of_them_wait_no_longer(self) -> None:
        found = steps({"b": 1.0, "c": 2.0}, prefill_wait_steps=5, prefill_wait_tokens=9)
        assert found[:4] == ["a", "a", "abc", "abc"]

    def test_those_that_find_no_room_are_not_among_them(self) -> None:
        found = steps(
            {"b": 1.0, "c": 1.0}, prefill_wait_steps=4, prefill_wait_tokens=9, max_batch_size=2
        )  # `b` alone is 4 tokens beside one that decodes
        assert found[:6] == ["a", "a", "a", "a", "a", "ab"]

    def test_nothing_waits_where_nothing_decodes(self) -> None:
        assert steps({"b": 0.0}, prefill_wait_steps=5)[0] == "ab"

    def test_there_is_no_room_to_wait_for(self) -> None:
        assert "ab" not in steps({"b": 1.0}, prefill_wait_steps=2, max_batch_size=1)[:7]


def test_tokens_are_some() -> None:
    with pytest.raises(ConfigError, match="prefill_wait_tokens"):
        SchedulerConfig(prefill_wait_tokens=0)
