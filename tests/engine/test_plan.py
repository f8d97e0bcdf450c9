"""The columns of sequences that decode."""

from __future__ import annotations

import pytest

from kvlab.core import Request, SamplingParams, Sequence
from kvlab.engine.step import StepInput
from kvlab.engine.step_plan import Chunk, DecodeBatch, StepPlan, slots_of


def decoding(
    name: str, slot: int, *, max_tokens: int = 9, stops: tuple[int, ...] = (), penalty: float = 1.0
) -> Sequence:
    """A sequence of three prompt tokens and one of output, 7."""
    sampling = SamplingParams(max_tokens, repetition_penalty=penalty)
    sequence = Sequence(Request(name, (1, 2, 3), sampling), stop_token_ids=frozenset(stops))
    sequence.token_ids.append(7)
    sequence.slot, sequence.is_decoding = slot, True
    return sequence


class TestDecodeBatch:
    def test_gives_each_its_token_and_names_those_that_have_got_their_last(self) -> None:
        sequences = [
            decoding("goes on", 0, stops=(50,)),
            decoding("full", 1, max_tokens=2),
            decoding("stops", 2, stops=(60,)),
        ]
        batch = DecodeBatch(sequences)
        assert batch.append([60, 5, 60], now=1.5) == [1, 2]
        assert [sequence.output_token_ids for sequence in sequences] == [[7, 60], [7, 5], [7, 60]]
        assert [sequence.token_times_s for sequence in sequences] == [[1.5]] * 3
        assert batch.last_tokens.tolist() == [60, 5, 60]
        assert batch.num_outputs.tolist() == [2, 2, 2]
        assert batch.num_known == 15

    def test_those_that_leave_take_their_columns_with_them(self) -> None:
        sequences = [decoding(name, slot) for slot, name in enumerate("abcd")]
        batch = DecodeBatch(sequences)
        batch.remove([0, 2, 17])
        batch.add([decoding("e", 2, penalty=2.0)])
        assert [sequence.request.request_id for sequence in batch.sequences] == ["b", "d", "e"]
        assert [spec.request_id for spec in batch.specs] == ["b", "d", "e"]
        assert batch.slots.tolist() == [1, 3, 2]
        batch.append([8, 9, 10], now=0.0)
        assert batch.histories() == {2: (1, 2, 3, 7, 10)}
        assert sequences[0].output_token_ids == [7]


@pytest.mark.parametrize("decode_last", [False, True])
def test_a_step_input_is_in_the_order_of_the_plan(decode_last: bool) -> None:
    first = Sequence(Request("first", (20, 21, 22, 23), SamplingParams(4, repetition_penalty=3.0)))
    second = Sequence(Request("second", (30, 31), SamplingParams(4)))
    first.slot, second.slot = 5, 6
    batch = DecodeBatch([decoding("a", 0), decoding("b", 1, penalty=2.0)])
    plan = StepPlan(batch, [Chunk(second, 1), Chunk(first, 4)], decode_last)
    step = StepInput.of(plan)
    names = [sequence.request_id for sequence in step.sequences]
    if decode_last:
        assert names == ["second", "first", "a", "b"]
        assert step.token_ids.tolist() == [30, 20, 21, 22, 23, 7, 7]
        assert step.sampled.tolist() == [1, 2, 3]
        assert step.histories == {1: (20, 21, 22, 23), 3: (1, 2, 3, 7)}
        assert (step.num_tokens.tolist(), step.num_outputs.tolist()) == ([1, 4, 1, 1], [0, 0, 1, 1])
        assert plan.slots.tolist() == [6, 5, 0, 1]
    else:
        assert names == ["a", "b", "second", "first"]
        assert step.token_ids.tolist() == [7, 7, 30, 20, 21, 22, 23]
        assert step.sampled.tolist() == [0, 1, 3]
        assert step.histories == {1: (1, 2, 3, 7), 3: (20, 21, 22, 23)}
        assert (step.num_tokens.tolist(), step.num_outputs.tolist()) == ([1, 1, 1, 4], [1, 1, 0, 0])
        assert plan.slots.tolist() == [0, 1, 6, 5]
    assert [names[row] for row in step.sampled] == [each.request_id for each in step.sampling().sequences]


def test_a_sequence_without_a_slot_takes_part_in_nothing() -> None:
    with pytest.raises(RuntimeError, match="'a' runs without a slot"):
        slots_of([Sequence(Request("a", (1,), SamplingParams(1)))])
