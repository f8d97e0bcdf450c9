"""The contract between engine and executor: plain data in, plain data out."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from kvlab.core import Request, SamplingParams, TokenLogprobs
from kvlab.engine.clock import LogicalClock, WallClock
from kvlab.engine.step import StepInput, StepResult
from kvlab.kv.view import CacheView
from tests.support.engines import drain, make_engine, request
from tests.support.table import TableExecutor, table_engine, table_pool


class Pickling(TableExecutor):
    """Keeps each pass's input as bytes, and computes what they stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[StepInput] = []

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        data = pickle.dumps(step)
        assert b"Request" not in data
        self.inputs.append(pickle.loads(data))
        return super().execute(self.inputs[-1], view)


def asked(name: str, prompt: tuple[int, ...], max_tokens: int, **sampling: float) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens, **sampling))  # type: ignore[arg-type]


def test_the_columns_of_a_step() -> None:
    executor = Pickling()
    engine = table_engine(table_pool(60), executor, max_batched_tokens=8)
    engine.add_request(asked("a", (1, 2, 3), 3, repetition_penalty=1.5))
    engine.step()
    b = engine.add_request(asked("b", tuple(range(10, 20)), 2))
    drain(engine)
    first, second, third, *_ = executor.inputs
    assert first.token_ids.tolist() == [1, 2, 3]
    assert first.sampled.tolist() == [0]
    assert first.histories == {0: (1, 2, 3)}
    (token,) = second.token_ids[:1].tolist()
    assert second.token_ids.tolist() == [token, *range(10, 17)]
    assert second.num_tokens.tolist() == [1, 7]
    assert [sequence.request_id for sequence in second.sequences] == ["a", "b"]
    assert second.num_outputs.tolist() == [1, 0]
    assert second.sampled.tolist() == second.logits_rows().tolist() == [0]  # b's prompt goes on
    assert second.histories == {0: (1, 2, 3, token)}
    assert third.sequences[1] == b.spec
    assert third.sampled.tolist() == [0, 1]
    assert third.logits_rows().tolist() == [0, 3]


def test_the_sampled_rows_alone_keep_their_order_and_their_histories() -> None:
    executor = Pickling()
    engine = table_engine(table_pool(60), executor, max_batched_tokens=8, long_prefill_threshold=3)
    engine.add_request(asked("long", tuple(range(100, 109)), 2))
    engine.add_request(asked("short", (1, 2, 3), 2, repetition_penalty=2.0))
    drain(engine)
    batch = executor.inputs[0].sampling()
    assert [sequence.request_id for sequence in batch.sequences] == ["short"]
    assert batch.num_outputs.tolist() == [0]
    assert batch.histories == {0: (1, 2, 3)}
    assert len(executor.inputs[0].sequences) == 2


def test_log_probabilities_come_back_in_the_result() -> None:
    class Certain(TableExecutor):
        def execute(self, step: StepInput, view: CacheView) -> StepResult:
            tokens = super().execute(step, view).token_ids
            asked = [sequence.sampling.logprobs is not None for sequence in step.sampling().sequences]
            return StepResult(tokens, [TokenLogprobs(-0.5) if each else None for each in asked])

    engine = table_engine(table_pool(60), Certain())
    traced, plain = engine.add_request(asked("a", (1,), 3, logprobs=0)), engine.add_request(asked("b", (2,), 3))
    drain(engine)
    assert traced.logprobs == [TokenLogprobs(-0.5)] * 3
    assert plain.logprobs == []


def test_log_probabilities_of_another_number_of_tokens_fail_the_pass() -> None:
    class Short(TableExecutor):
        def execute(self, step: StepInput, view: CacheView) -> StepResult:
            return StepResult(super().execute(step, view).token_ids, [])

    engine = table_engine(table_pool(60), Short())
    sequence = engine.add_request(asked("a", (1,), 3))
    drain(engine)
    assert sequence.finish_reason == "failed"


class TestTime:
    def test_that_a_modelled_device_took_is_added_to_a_logical_clock(self) -> None:
        clock = LogicalClock()
        engine = table_engine(table_pool(60), TableExecutor(step_s=2.0, token_s=0.5), clock)
        sequence = engine.add_request(asked("a", (1, 2, 3, 4), 3))
        records = drain(engine)
        assert sequence.token_times_s == [4.0, 6.5, 9.0]
        assert [record.execute_ms for record in records if record.batch_seqs] == [4000.0, 2500.0, 2500.0]

    def test_moves_no_other_clock(self) -> None:
        engine = table_engine(table_pool(60), TableExecutor(step_s=1e6), WallClock())
        engine.add_request(asked("a", (1,), 2))
        assert drain(engine)[-1].end_s < 1e6

    def test_never_runs_backwards(self) -> None:
        clock = LogicalClock()
        clock.wait_until(3.0)
        clock.wait_until(1.0)
        with pytest.raises(ValueError, match="advanced by -1"):
            clock.advance(-1.0)
        assert clock.now() == 3.0


def test_the_sampler_samples_from_what_the_step_says() -> None:
    """Two engines whose passes differ give a request the same tokens: nothing but the columns is read."""
    outputs = []
    for others in (0, 3):
        engine = make_engine(max_batched_tokens=16)
        for index in range(others):
            engine.add_request(request(f"other{index}", 9, 12, temperature=1.0))
        sequence = engine.add_request(
            request("x", 9, 12, temperature=1.0, seed=5, repetition_penalty=1.3, logprobs=1)
        )
        drain(engine)
        outputs.append((sequence.output_token_ids, [round(each.logprob, 3) for each in sequence.logprobs]))
    assert outputs[0] == outputs[1]


def test_the_contract_needs_no_torch() -> None:
    code = "import sys, kvlab.engine.step, kvlab.engine.clock; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
