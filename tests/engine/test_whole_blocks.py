"""TensorRT-LLM's prompts: all their blocks at once, chunks of whole blocks, none twice (`scheduler.chunk_unit`)."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.config import KVConfig, SchedulerConfig
from kvlab.core import Request, SamplingParams, Sequence, SequenceStatus
from kvlab.engine.batching import Stop
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.core import EngineCore
from kvlab.errors import ConfigError, TooLongError
from tests.simulation.test_executor import config
from tests.simulation.test_runs import check
from tests.support.engines import drain
from tests.support.table import TableExecutor, table_engine, table_pool


def engine_of(blocks: int, budget: int = 20, *, sharing: bool = False, **settings: Any) -> EngineCore:
    """Blocks of four tokens."""
    common: dict[str, Any] = {
        "reserve_output": True,
        "admission_reserve": 0.0,
        "chunk_unit": 4,
        "max_batch_size": 8,
    }
    pool = table_pool(blocks, 4, sharing=sharing)
    return table_engine(pool, TableExecutor(1.0), **common | {"max_batched_tokens": budget} | settings)


def add(engine: EngineCore, name: str, prompt: int | tuple[int, ...], most: int = 8) -> Sequence:
    tokens = tuple(range(100 * len(name), 100 * len(name) + prompt)) if isinstance(prompt, int) else prompt
    return engine.add_request(Request(name, tokens, SamplingParams(most, ignore_eos=True)))


def computed(engine: EngineCore, *sequences: Sequence) -> list[int]:
    engine.step()
    return [sequence.num_computed for sequence in sequences]


class TestChunks:
    def test_are_whole_blocks_but_for_the_last(self) -> None:
        engine = engine_of(30)
        first, second = add(engine, "a", 13), add(engine, "bb", 11)
        assert computed(engine, first, second) == [13, 4]  # of the seven tokens that are left
        assert computed(engine, first, second) == [14, 11]
        drain(engine)

    def test_what_is_less_than_a_block_goes_to_none(self) -> None:
        engine = engine_of(30)
        first, second = add(engine, "a", 18), add(engine, "bb", 3)
        assert computed(engine, first, second) == [18, 0]
        assert second.status is SequenceStatus.WAITING
        assert engine._batch.stop is Stop.TOKENS  # two are left, and no policy keeps it out
        assert computed(engine, second) == [3]
        drain(engine)

    def test_of_a_prompt_in_prefill_waits_where_no_whole_one_is_left(self) -> None:
        engine = engine_of(60, 9)
        long = add(engine, "a", 30)
        assert computed(engine, long) == [8]
        scheduler = engine.scheduler
        scheduler.begin_step(2.0)
        assert scheduler.plan_prefill(3) == []
        assert scheduler.plan_prefill(7) == [(long, 4)]
        drain(engine)

    def test_cached_tokens_are_not_counted(self) -> None:
        engine = engine_of(40, sharing=True)
        shared = tuple(range(1, 17))
        add(engine, "a", (*shared, 30), most=2)
        drain(engine)
        other, same = add(engine, "bb", 18), add(engine, "c", (*shared, 31, 32))
        assert computed(engine, other, same) == [18, 18]
        drain(engine)

    def test_a_prompt_longer_than_a_step_that_is_cached_whole_computes_its_last_token(self) -> None:
        engine = engine_of(40, 16, sharing=True)
        shared = tuple(range(1, 33))
        add(engine, "a", shared, most=2)
        drain(engine)
        again = add(engine, "bb", shared)
        assert computed(engine, again) == [32]
        assert again.cached_tokens == 31
        drain(engine)

    def test_a_prompt_that_is_scored_finds_nothing_cached(self) -> None:
        engine = engine_of(60, sharing=True)
        shared = tuple(range(1, 33))
        add(engine, "a", shared, most=2)
        drain(engine)
        other = add(engine, "bb", 17)
        scored = engine.add_request(Request("c", (*shared, 40), SamplingParams(2, prompt_logprobs=1)))
        assert computed(engine, other, scored) == [17, 0]
        assert computed(engine, scored) == [16]
        drain(engine)

    def test_one_of_which_less_was_cached_than_it_seemed_goes_on_in_the_next_step(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was found when the step began may be evicted for a prompt before it."""
        engine = engine_of(40, sharing=True)
        monkeypatch.setattr(engine.pool, "prefix_tokens", lambda tokens, salt: 20)
        other, late = add(engine, "bb", 18), add(engine, "c", 22)
        assert computed(engine, other, late) == [18, 0]
        assert late.status is SequenceStatus.RUNNING
        assert computed(engine, other, late) == [19, 16]
        drain(engine)

    def test_steps_at_once_are_those_one_by_one(self) -> None:
        """Of 26 tokens each takes 8, as it has room for 11; but the last 10 fit at once."""
        requests = [
            Request("a", tuple(range(3)), SamplingParams(40, ignore_eos=True)),
            Request("b", tuple(range(10, 36)), SamplingParams(2, ignore_eos=True), arrival_s=0.001),
        ]
        scheduler = SchedulerConfig(max_batch_size=4, max_batched_tokens=12, chunk_unit=8)
        kv = KVConfig(num_blocks=60, block_size=8, backend="paged")
        count, log = check(requests, {"kv": kv, "scheduler": scheduler})
        assert count
        assert [step.prefill_tokens for step in log.steps if step.prefill_tokens] == [3, 8, 8, 10]

    def test_more_than_a_step_keeps_prompts_whole(self) -> None:
        engine = engine_of(40, 20, chunk_unit=64)
        first, second = add(engine, "a", 13), add(engine, "bb", 11)
        assert computed(engine, first, second) == [13, 0]
        assert computed(engine, second) == [11]
        with pytest.raises(TooLongError, match=r"21 prompt tokens are more than the 20 of a step.*smaller unit"):
            add(engine, "ccc", 21)
        drain(engine)


class TestPartsOfBlocks:
    """What is found of a prompt's first new block counts in its first step as if it were computed."""

    shared = tuple(range(1, 19))  # four blocks and two tokens

    def engine(self, budget: int) -> EngineCore:
        engine = table_engine(
            table_pool(60, 4, parts=True), TableExecutor(1.0), chunk_unit=4, max_batch_size=4,
            reserve_output=True, max_batched_tokens=budget,
        )  # fmt: skip
        add(engine, "a", (*self.shared, 30, 31, 32), most=2)
        drain(engine)
        return engine

    @pytest.mark.parametrize(
        ("own", "budget", "steps"),
        [(10, 12, [28]), (10, 11, [24, 28]), (8, 9, [26]), (10, 5, [20, 24, 28])],
    )
    def test_a_chunk_ends_with_a_block(self, own: int, budget: int, steps: list[int]) -> None:
        engine = self.engine(budget)
        long = add(engine, "b", (*self.shared, *range(40, 40 + own)))
        assert [*(computed(engine, long)[0] for _ in steps)] == steps
        assert long.cached_tokens == 18
        drain(engine)

    def test_keep_the_next_prompt_out_where_nothing_is_left_of_a_step(self) -> None:
        engine = self.engine(12)
        first, second, third = (
            add(engine, "b", (*self.shared, *range(40, 47))),
            add(engine, "c", 3),
            add(engine, "dd", 3),
        )
        assert computed(engine, first, second, third) == [25, 3, 0]
        assert engine._batch.stop is Stop.TOKENS
        drain(engine)

    def test_of_what_is_left_of_a_step(self) -> None:
        engine = self.engine(13)
        first = add(engine, "b", (*self.shared, *range(40, 47)))
        second, third = add(engine, "c", 3), add(engine, "dd", 3)
        assert computed(engine, first, second, third) == [25, 3, 0]  # 7 and 2 found, 3, and one that is left
        drain(engine)

    def test_steps_at_once_are_those_one_by_one(self) -> None:
        asked = [
            ("a", (*self.shared, 30), 3, 0.0),
            ("b", (*self.shared, 31), 40, 1.0),
            ("c", tuple(range(200, 208)), 80, 2.0),
        ]
        asked += [("d", (*self.shared, *range(60, 100)), 30, 2.0), ("e", (*self.shared, 30, 7), 8, 9.0)]
        requests = [
            Request(name, prompt, SamplingParams(most, ignore_eos=True), arrival_s=arrival)
            for name, prompt, most, arrival in asked
        ]
        scheduler = SchedulerConfig(max_batch_size=4, max_batched_tokens=12, chunk_unit=4)
        kv = KVConfig(num_blocks=60, block_size=4, backend="paged", partial_reuse=True)
        count, log = check(requests, {"kv": kv, "scheduler": scheduler})
        assert count
        assert [record.cached_tokens for record in log.records] == [0, 18, 0, 18, 19]


class TestMemory:
    def test_a_prompt_takes_all_its_blocks_at_once(self) -> None:
        for unit, blocks in ((4, 10), (None, 5)):
            engine = engine_of(30, chunk_unit=unit)
            add(engine, "a", 40)
            engine.step()
            assert engine.pool.stats().blocks_in_use == blocks
            drain(engine)

    def test_the_last_token_has_room_too(self) -> None:
        """Nobody computes it: 12 and 5 tokens need four blocks, and TensorRT-LLM counts five."""
        for unit, running in ((4, 1), (None, 2)):
            engine = engine_of(4 + 4, 32, chunk_unit=unit)
            add(engine, "a", 12, most=5)
            add(engine, "bb", 12, most=5)
            record = engine.step()
            assert record is not None
            assert record.running == running
            drain(engine)


class TestEqualPrompts:
    shared = tuple(range(1, 9))

    def both(self, **settings: Any) -> tuple[EngineCore, Sequence, Sequence, Sequence]:
        engine = engine_of(60, 64, **{"sharing": True} | settings)
        first, same = add(engine, "a", (*self.shared, 20)), add(engine, "b", (*self.shared, 21))
        return engine, first, same, add(engine, "cc", 9)

    def test_wait_for_the_first_and_are_overtaken(self) -> None:
        engine, first, same, other = self.both()
        assert computed(engine, first, same, other) == [9, 0, 9]
        assert computed(engine, same) == [9]
        assert same.cached_tokens == 8
        drain(engine)

    @pytest.mark.parametrize(("sharing", "waits"), [(True, True), (False, False)])
    def test_wait_in_an_engine_that_shares(self, sharing: bool, waits: bool) -> None:
        kv = KVConfig(num_blocks=60, block_size=4, backend="paged", prefix_sharing=sharing)
        scheduler = SchedulerConfig(reserve_output=True, admission_reserve=0.0, chunk_unit=4)
        engine = build_engine(plan_engine(config("simulated", kv=kv, scheduler=scheduler)))
        add(engine, "a", (*self.shared, 20))
        same = add(engine, "b", (*self.shared, 21))
        engine.step()
        assert (same.status is SequenceStatus.WAITING) is waits
        drain(engine)

    @pytest.mark.parametrize("settings", [{"chunk_unit": None}, {"sharing": False}])
    def test_do_not_wait_elsewhere(self, settings: dict[str, Any]) -> None:
        engine, first, same, other = self.both(**settings)
        assert computed(engine, first, same, other) == [9, 9, 9]
        drain(engine)

    def test_wait_for_each_chunk(self) -> None:
        engine = engine_of(60, 8, sharing=True, max_batch_size=4)
        shared = tuple(range(1, 21))
        first, same = add(engine, "a", (*shared, 30)), add(engine, "b", (*shared, 31))
        seen = [(*computed(engine, first, same),) for _ in range(4)]
        assert seen == [(8, 0), (16, 0), (21, 0), (22, 21)]
        assert same.cached_tokens == 20
        drain(engine)

    def test_no_more_are_looked_at_than_may_run(self) -> None:
        engine = engine_of(60, 64, sharing=True, max_batch_size=2)
        prompts = [add(engine, name, (*self.shared, number)) for number, name in enumerate("abc")]
        other = add(engine, "dd", 9)
        assert computed(engine, *prompts, other) == [9, 0, 0, 0]
        drain(engine)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"chunk_unit": 0}, "at least 1"),
        ({"chunk_unit": 4, "reserve_output": True, "conservativeness": 1.0}, "leave one of them null"),
        ({"chunk_unit": 4, "policy": "static"}, "leave it null"),
        ({"chunk_unit": 600}, "more than the 512 tokens of a step.*reserve_output=true, or a smaller unit"),
    ],
)
def test_what_contradicts_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SchedulerConfig(**settings)
