"""A sampled token depends on its request, its index and the logits, and on nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvlab.core import Request, SamplingParams, Sequence
from kvlab.engine.sampler import Sampler
from kvlab.models.decoder import Decoder
from tests.support.engines import make_engine, request, run, sampling_batch
from tests.support.model import expected_tokens


def warm(name: str = "x", *, seed: int | None = 7, temperature: float = 1.0) -> Request:
    return request(name, 20, 30, prompt_of="x", seed=seed, temperature=temperature)


def alone(asked: Request) -> list[int]:
    (sequence,) = run(make_engine(), asked)
    return sequence.output_token_ids


class TestSeeded:
    def test_the_same_seed_gives_the_same_tokens_and_another_gives_others(self) -> None:
        assert alone(warm(seed=7)) == alone(warm(seed=7))
        assert alone(warm(seed=7)) != alone(warm(seed=8))

    def test_sampled_tokens_are_not_the_greedy_ones(self) -> None:
        assert alone(warm()) != expected_tokens(warm())

    def test_the_company_in_the_batch_changes_nothing(self) -> None:
        company = [request(f"other{index}", 7, 25, seed=index, temperature=2.0) for index in range(3)]
        for position in range(4):
            batch = [*company[:position], warm(), *company[position:]]
            sequences = run(make_engine(max_batched_tokens=16), *batch)
            assert sequences[position].output_token_ids == alone(warm())

    def test_two_requests_with_the_same_seed_and_prompt_get_the_same(self) -> None:
        first, second = run(make_engine(), warm("x"), warm("y"))
        assert first.output_token_ids == second.output_token_ids == alone(warm())

    def test_a_preemption_changes_nothing(self) -> None:
        asked = [warm(name, seed=seed) for name, seed in (("x", 1), ("y", 2), ("z", 3))]
        sequences = run(make_engine(admission_reserve=0), *asked)
        assert any(sequence.preemptions for sequence in sequences)
        assert [sequence.output_token_ids for sequence in sequences] == [alone(each) for each in asked]

    def test_the_state_of_torch_is_neither_read_nor_changed(self) -> None:
        torch.manual_seed(1)
        first, state = alone(warm()), torch.get_rng_state()
        torch.manual_seed(2)
        assert alone(warm()) == first
        torch.manual_seed(1)
        assert torch.equal(torch.get_rng_state(), state)


def test_without_a_seed_two_runs_differ() -> None:
    assert alone(warm(seed=None)) != alone(warm(seed=None))


def test_temperature_0_is_greedy_whatever_the_seed() -> None:
    assert alone(warm(temperature=0.0, seed=3)) == expected_tokens(warm())


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    greedy, sampled = run(make_engine(), request("g", 9, 12), warm())
    assert greedy.output_token_ids == expected_tokens(greedy.request)
    assert sampled.output_token_ids == alone(warm())


@pytest.mark.parametrize(
    ("more", "needs_logits"),
    [
        ({}, False),
        ({"logprobs": 0}, True),
        ({"temperature": 0.5}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"logit_bias": ((3, 1.0),)}, True),
        ({"min_tokens": 2}, True),
    ],
)
def test_logits_are_kept_only_where_more_than_the_largest_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], needs_logits: bool
) -> None:
    passes = Counter[str]()

    def counted(name: str) -> Callable[..., Any]:
        wrapped = getattr(Decoder, name)

        def call(*arguments: Any) -> Any:
            passes[name] += 1
            return wrapped(*arguments)

        return call

    for name in ("forward", "forward_top1"):
        monkeypatch.setattr(Decoder, name, counted(name))
    run(make_engine(), request("plain", 9, 6))
    assert set(passes) == {"forward_top1"}
    passes.clear()
    run(make_engine(), request("plain", 9, 2), request("x", 9, 2, **more))
    assert set(passes) == {"forward" if needs_logits else "forward_top1"}


class TestSampler:
    LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])

    def draws(self, temperature: float, count: int = 4000) -> Counter[int]:
        """One token for each of many seeds, in one call."""
        sequences = [
            Sequence(Request(f"r{seed}", (1,), SamplingParams(1, temperature=temperature, seed=seed)))
            for seed in range(count)
        ]
        return Counter(Sampler()(self.LOGITS.expand(count, -1), sampling_batch(*sequences)).token_ids)

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_draws_from_the_softmax_of_logits_over_temperature(self, temperature: float) -> None:
        found, expected = self.draws(temperature), torch.softmax(self.LOGITS / temperature, dim=0)
        for token, probability in enumerate(expected.tolist()):
            assert found[token] / 4000 == pytest.approx(probability, abs=0.03)
        assert found[4] == 0

    def test_each_index_of_a_request_is_a_draw_of_its_own(self) -> None:
        sequence = Sequence(Request("x", (1,), SamplingParams(500, temperature=1.0, seed=3)))
        for _ in range(500):
            sequence.token_ids += Sampler()(self.LOGITS[None], sampling_batch(sequence)).token_ids
        found = Counter(sequence.output_token_ids)
        expected = torch.softmax(self.LOGITS, dim=0)
        assert found[0] / 500 == pytest.approx(float(expected[0]), abs=0.08)
        assert found[2] / 500 == pytest.approx(float(expected[2]), abs=0.08)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_greedy_takes_the_largest_of_each_row(self, dtype: torch.dtype) -> None:
        sequences = [Sequence(Request(f"r{row}", (1,), SamplingParams(1))) for row in range(3)]
        logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 4.0], [-3.0, -2.0, -1.0]], dtype=dtype)
        assert Sampler()(logits, sampling_batch(*sequences)).token_ids == [1, 0, 2]

    def test_nothing_to_sample_gives_nothing(self) -> None:
        assert Sampler()(torch.empty(0, 5), sampling_batch()).token_ids == []
