"""A pass that fails is rolled back and run again without its culprit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvlab.config import FaultsConfig
from kvlab.core import FinishReason, Request, SamplingParams, Sequence
from kvlab.engine.core import EngineCore
from kvlab.engine.faults import FaultyExecutor, InjectedFault
from kvlab.engine.step import StepInput, StepResult
from kvlab.errors import SamplingError
from kvlab.kv.view import CacheView
from tests.support.engines import Aborting, Stream, drain, steps
from tests.support.table import TableExecutor, table_engine, table_pool, undisturbed

Rule = Callable[[list[str], int], None]


class Trap(TableExecutor):
    """Runs a rule on the names of each pass, before or after it is computed; the rule may raise."""

    def __init__(self, rule: Rule, *, late: bool = False) -> None:
        super().__init__()
        self.rule, self.late = rule, late

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        names = [sequence.request_id for sequence in step.sequences]
        if not self.late:
            self.steps.append([(name, 0) for name in names])
            self.rule(names, len(self.steps))
            self.steps.pop()
        result = super().execute(step, view)
        if self.late:
            self.rule(names, len(self.steps))
        return result


def poisoned(*culprits: str) -> Rule:
    def rule(names: list[str], count: int) -> None:
        if set(culprits) & set(names):
            raise ArithmeticError("poison")

    return rule


def asked(number: int, prompt_len: int = 9, max_tokens: int = 6) -> Request:
    first = 1000 * number
    return Request(f"r{number}", tuple(range(first, first + prompt_len)), SamplingParams(max_tokens))


def submit(engine: EngineCore, count: int) -> list[Sequence]:
    return [engine.add_request(asked(number)) for number in range(count)]


def assert_only_failed(sequences: list[Sequence], *culprits: str) -> None:
    for sequence in sequences:
        if sequence.request.request_id in culprits:
            assert sequence.finish_reason is FinishReason.FAILED
        else:
            assert sequence.finish_reason is FinishReason.LENGTH
            assert sequence.output_token_ids == undisturbed(sequence.request)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("culprits", [["r0"], ["r5"], ["r7"], ["r2", "r3"], ["r0", "r4", "r7"]], ids=str)
def test_the_culprits_fail_and_the_others_get_their_tokens(
    culprits: list[str], mixed: bool, sharing: bool, late: bool
) -> None:
    executor = Trap(poisoned(*culprits), late=late)
    engine = table_engine(table_pool(60, sharing=sharing), executor, mixed=mixed, max_batched_tokens=30)
    sequences = submit(engine, 8)
    drain(engine)
    assert_only_failed(sequences, *culprits)
    assert executor.errors == []


@pytest.mark.parametrize("size", [1, 2, 8, 32])
def test_finding_one_of_many_takes_two_passes_for_each_halving(size: int) -> None:
    executor = Trap(poisoned(f"r{size // 2}"))
    engine = table_engine(table_pool(400), executor, max_batch_size=size, max_batched_tokens=512)
    sequences = submit(engine, size)
    record = engine.step()
    assert record is not None
    assert record.failed_passes == 1 + math.log2(size)
    assert len(executor.steps) == 1 + 2 * math.log2(size)
    drain(engine)
    assert_only_failed(sequences, f"r{size // 2}")


def test_an_error_that_names_its_culprits_is_believed() -> None:
    def rule(names: list[str], count: int) -> None:
        bad = [name for name in names if name in ("r1", "r6")]
        if bad:
            raise SamplingError(bad)

    executor = Trap(rule)
    engine = table_engine(table_pool(60), executor)
    sequences = submit(engine, 8)
    engine.step()
    assert len(executor.steps) == 2
    drain(engine)
    assert_only_failed(sequences, "r1", "r6")


def test_a_dead_device_fails_the_step_without_trying_each_sequence() -> None:
    def dead(names: list[str], count: int) -> None:
        raise ArithmeticError("the device is gone")

    executor = Trap(dead)
    engine = table_engine(table_pool(600), executor, max_batch_size=64, max_batched_tokens=640)
    sequences = submit(engine, 64)
    engine.step()
    assert {sequence.finish_reason for sequence in sequences} == {FinishReason.FAILED}
    assert len(executor.steps) < 40
    drain(engine)
    executor.rule = poisoned()
    after = engine.add_request(asked(99))
    drain(engine)
    assert_only_failed([after])


def test_too_few_tokens_are_a_failure_too() -> None:
    class Short(TableExecutor):
        def execute(self, step: StepInput, view: CacheView) -> StepResult:
            tokens = super().execute(step, view).token_ids
            return StepResult(tokens[:-1] if len(tokens) > 1 else tokens)

    engine = table_engine(table_pool(60), Short())
    sequences = submit(engine, 3)
    drain(engine)
    assert_only_failed(sequences)


def test_a_sequence_aborted_by_a_callback_meanwhile_is_not_tried_again() -> None:
    executor = Trap(poisoned("r0"))
    engine = table_engine(table_pool(60), executor)
    streams = [Stream() for _ in range(4)]
    engine.add_request(asked(0), Aborting(engine, "r3"))
    for number in (1, 2, 3):
        engine.add_request(asked(number), streams[number])
    drain(engine)
    assert streams[3].ends == [FinishReason.ABORTED]
    assert all("r3" not in dict(step) for step in executor.steps[2:])
    assert streams[1].tokens == undisturbed(asked(1))


def test_an_interrupt_leaves_the_pool_as_it_was_and_the_engine_able_to_go_on() -> None:
    def interrupt(names: list[str], count: int) -> None:
        if count == 4:
            raise KeyboardInterrupt

    executor = Trap(interrupt)
    engine = table_engine(table_pool(60, sharing=True), executor, mixed=False, max_batched_tokens=20)
    sequences = submit(engine, 4)
    with pytest.raises(KeyboardInterrupt):
        for _ in steps(engine):
            pass
    assert engine.pool.audit() == []
    drain(engine)
    assert_only_failed(sequences)


class TestInjectedFaults:
    @pytest.mark.parametrize("kind", ["forward", "sampler", "sequence", "any"])
    @pytest.mark.parametrize("sharing", [False, True])
    def test_no_kind_costs_a_healthy_sequence_a_token(self, kind: str, sharing: bool) -> None:
        """Transient faults strike a sequence only where it fails alone, which says it is the culprit."""
        config = FaultsConfig(kind=kind, rate=0.1, seed=3)
        executor = TableExecutor()
        engine = table_engine(table_pool(60, sharing=sharing), executor, faults=config)
        sequences = [engine.add_request(asked(number, 5 + number % 7, 9)) for number in range(40)]
        records = drain(engine)
        assert sum(record.failed_passes for record in records) > 0
        assert executor.errors == []
        oracle = FaultyExecutor(executor, config)
        for sequence in sequences:
            since = oracle.poisoned_from(sequence.spec)
            expected = undisturbed(sequence.request)
            if since is not None:
                assert sequence.finish_reason is FinishReason.FAILED
                assert len(sequence.output_token_ids) <= since
            assert sequence.output_token_ids == expected[: sequence.num_output_tokens]
            if sequence.finish_reason is FinishReason.FAILED:
                assert "InjectedFault" in (sequence.error or "")
            else:
                assert sequence.output_token_ids == expected

    def test_a_poisoned_request_fails_within_the_output_that_it_has(self) -> None:
        """Not in one of the tokens that a recorded client asked for at most, of which few are produced."""
        engine = table_engine(table_pool(400), faults=FaultsConfig(kind="sequence", rate=1.0))
        sequences = [
            engine.add_request(replace(asked(number, max_tokens=1000), output_tokens=3)) for number in range(20)
        ]
        drain(engine)
        assert {sequence.finish_reason for sequence in sequences} == {FinishReason.FAILED}

    def test_the_same_seed_gives_the_same_faults(self) -> None:
        runs = []
        for seed in (1, 1, 2):
            engine = table_engine(table_pool(60), faults=FaultsConfig(rate=0.05, seed=seed))
            sequences = [engine.add_request(asked(number)) for number in range(30)]
            records = drain(engine)
            runs.append(([s.error for s in sequences], [record.failed_passes for record in records]))
        assert runs[0] == runs[1] != runs[2]

    def test_no_rate_no_fault(self) -> None:
        engine = table_engine(table_pool(60), faults=FaultsConfig(rate=0.0))
        sequences = submit(engine, 8)
        assert sum(record.failed_passes for record in drain(engine)) == 0
        assert_only_failed(sequences)

    def test_says_what_it_is(self) -> None:
        engine = table_engine(table_pool(60), faults=FaultsConfig(kind="forward", rate=1.0))
        (sequence,) = submit(engine, 1)
        drain(engine)
        assert sequence.error == f"{InjectedFault.__name__}: the forward pass failed"
