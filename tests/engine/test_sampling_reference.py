"""The vectorised sampler against the readable one, row by row and through the whole engine."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.core import Request, SamplingParams, Sequence, TokenLogprobs
from kvlab.engine import logits as ops
from kvlab.engine.sampler import Sampler
from kvlab.models.ops import select_ops
from kvlab.models.ops.torch_ops import TorchOps
from kvlab.splitmix import uniforms
from tests.engine.sampling_reference import adjusted, distribution, mix, pick, reference_tokens, softmax, uniform
from tests.support.engines import drain, make_engine, request, sampling_batch
from tests.support.pools import paged_pool, sharing_pool

ANY_SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(3, 8),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    seed=st.integers(0, 2**70),
    top_k=st.sampled_from([0, 1, 3, 20, 500]),
    top_p=st.sampled_from([0.1, 0.53, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.6]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.8, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -0.25]),
    logit_bias=st.dictionaries(st.integers(0, 199), st.sampled_from([-100.0, 1.5, 4.0]), max_size=3).map(
        lambda found: tuple(found.items())
    ),
    allowed_token_ids=st.sampled_from([(), (), tuple(range(0, 200, 3))]),
    bad_words=st.lists(st.lists(st.sampled_from([3, 6, 9]), min_size=1, max_size=3).map(tuple), max_size=4).map(
        tuple
    ),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.lists(st.integers(0, 199), max_size=3).map(tuple),
    logprobs=st.sampled_from([None, 0, 2]),
)


def sequence(sampling: SamplingParams, prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = ()) -> Sequence:
    asked = Request("x", prompt, sampling)
    made = Sequence(asked, stop_token_ids=frozenset(sampling.stop_token_ids))
    made.token_ids = [*prompt, *output]
    return made


def sampled(logits: torch.Tensor, *sequences: Sequence) -> list[int]:
    return Sampler()(logits, sampling_batch(*sequences)).token_ids


def logprobs_of(logits: torch.Tensor, *sequences: Sequence) -> list[TokenLogprobs | None]:
    found = Sampler()(logits, sampling_batch(*sequences)).logprobs
    assert found is not None
    return found


class TestAgainstTheReference:
    @settings(max_examples=100)
    @given(
        rows=st.lists(st.tuples(ANY_SAMPLING, st.integers(0, 5)), min_size=1, max_size=8),
        seed=st.integers(0, 2**31),
        spread=st.sampled_from([0.1, 1.0, 5.0]),
    )
    def test_every_row_of_a_mixed_batch(
        self, rows: list[tuple[SamplingParams, int]], seed: int, spread: float
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(rows), 300, generator=generator) * spread
        said = torch.randint(0, 300, (len(rows), 9), generator=generator).tolist()
        batch = [
            sequence(sampling, tuple(words[:4]), tuple(words[4 : 4 + count]))
            for (sampling, count), words in zip(rows, said, strict=True)
        ]
        expected = [
            pick(
                logits[row].tolist(),
                each.request.sampling,
                token_ids=each.token_ids,
                barred=each.stop_token_ids if each.num_output_tokens < each.request.sampling.min_tokens else (),
                position=each.num_output_tokens,
            )
            for row, each in enumerate(batch)
        ]
        before = logits.clone()
        assert sampled(logits, *batch) == expected
        assert torch.equal(logits, before)

    @settings(max_examples=40)
    @given(
        asked=st.lists(st.tuples(st.integers(1, 20), ANY_SAMPLING), min_size=1, max_size=5),
        samples=st.integers(1, 3),
        num_blocks=st.integers(8, 24),
        budget=st.integers(6, 40),
        share=st.booleans(),
    )
    def test_tokens_depend_on_the_request_alone(
        self, asked: list[tuple[int, SamplingParams]], samples: int, num_blocks: int, budget: int, share: bool
    ) -> None:
        """Whatever else runs, whatever the chunks, preempted or not, with a shared prefix or none."""
        pool = (sharing_pool if share else paged_pool)(num_blocks)
        engine = make_engine(pool, eos=(17,), max_batch_size=6, max_batched_tokens=budget, admission_reserve=0)
        requests = [
            Request(f"r{number}", request("any", length, 1).prompt_token_ids, replace(sampling, n=samples))
            for number, (length, sampling) in enumerate(asked)
        ]
        firsts = [engine.add_request(each) for each in requests]
        drain(engine)
        for each, first in zip(requests, firsts, strict=True):
            for one in (first, *first.siblings):
                assert one.output_token_ids == reference_tokens(each, one.index, eos=(17,))
                expected = 0 if each.sampling.logprobs is None else one.num_output_tokens
                assert len(one.logprobs) == expected


class TestDistributions:
    """Chi-square of 20,000 draws against exact probabilities; with fixed seeds, so never by chance."""

    LOGITS = torch.linspace(-2.5, 2.5, 24)[torch.randperm(24, generator=torch.Generator().manual_seed(5))]
    DRAWS = 20_000

    @pytest.mark.parametrize(
        "values",
        [
            {},
            {"temperature": 0.4},
            {"temperature": 2.5},
            {"top_k": 5},
            {"top_p": 0.8},
            {"min_p": 0.2},
            {"repetition_penalty": 1.8},
            {"temperature": 1.5, "top_k": 12, "top_p": 0.7, "min_p": 0.1, "repetition_penalty": 0.8},
        ],
        ids=str,
    )
    def test_draws_have_the_exact_probabilities(self, values: dict[str, float]) -> None:
        sampling = SamplingParams(1, **({"temperature": 1.0} | values))  # type: ignore[arg-type]
        rows = [sequence(replace(sampling, seed=seed), (3, 4, 5)) for seed in range(self.DRAWS)]
        drawn = sampled(self.LOGITS.expand(self.DRAWS, -1), *rows)
        found = np.bincount(drawn, minlength=24)
        exact = np.array(distribution(adjusted(self.LOGITS.tolist(), sampling, (3, 4, 5), ()), sampling))
        assert found[exact == 0].sum() == 0
        possible = exact > 0
        expected = exact[possible] * self.DRAWS
        statistic = float((((found[possible] - expected) ** 2) / expected).sum())
        freedom = int(possible.sum()) - 1
        assert freedom > 1
        # Wilson and Hilferty's approximation of the quantile that chance exceeds once in 1,000.
        assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3

    def test_seeds_samples_and_positions_are_independent(self) -> None:
        """Pairs of neighbours fall evenly into a 10 by 10 grid."""
        grid = np.arange(5000)
        zeros = [0] * 5000
        for first, second in (
            (uniforms(grid.tolist(), zeros, zeros), uniforms((grid + 1).tolist(), zeros, zeros)),
            (uniforms(zeros, grid.tolist(), zeros), uniforms(zeros, (grid + 1).tolist(), zeros)),
            (uniforms(zeros, zeros, grid.tolist()), uniforms(zeros, zeros, (grid + 1).tolist())),
            (uniforms(grid.tolist(), zeros, zeros), uniforms(zeros, grid.tolist(), zeros)),
        ):
            counts = np.histogram2d(first, second, bins=10, range=[[0, 1], [0, 1]])[0]
            assert ((counts - 50) ** 2 / 50).sum() < 149  # exceeded once in 1,000, at 99 degrees of freedom
            assert 0 <= first.min() <= first.max() < 1


class TestRandomness:
    @given(st.tuples(st.integers(-(2**80), 2**80), st.integers(0, 2**20), st.integers(0, 2**20)))
    def test_is_the_published_function(self, key: tuple[int, int, int]) -> None:
        seed, sample, position = key
        assert uniforms([7, seed], [0, sample], [0, position])[1] == uniform(seed, sample, position)

    def test_the_finaliser_gives_the_authors_numbers(self) -> None:
        """The first outputs of SplitMix64 seeded with 1234567, as published with the generator."""
        state, found = 1234567, []
        for _ in range(3):
            state += 0x9E3779B97F4A7C15
            found.append(mix(state & (2**64 - 1)))
        assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


class TestFilters:
    def scores(self, *values: float) -> torch.Tensor:
        return torch.tensor([values], dtype=torch.float32)

    def kept(self, scores: torch.Tensor) -> list[int]:
        return scores[0].isfinite().nonzero().flatten().tolist()

    def test_ties_with_the_last_kept_are_kept(self) -> None:
        scores = self.scores(1, 3, 2, 2, 2, 0)
        ops.keep_top_k(scores, [2], TorchOps())
        assert self.kept(scores) == [1, 2, 3, 4]
        scores = self.scores(1, 1, 1, 1)
        ops.keep_top_p(scores, [0.3], TorchOps())
        assert self.kept(scores) == [0, 1, 2, 3]

    def test_the_token_that_reaches_the_mass_is_in_the_nucleus(self) -> None:
        for mass, count in ((0.4, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.999, 4)):
            scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
            ops.keep_top_p(scores, [mass], TorchOps())
            assert self.kept(scores) == list(range(count))

    def test_a_nucleus_wider_than_the_usual(self) -> None:
        scores = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)) * 0.1
        scores[1] *= 80
        expected = [sorted(softmax(row.tolist()), reverse=True) for row in scores]
        ops.keep_top_p(scores, [0.9, 0.9], TorchOps())
        for row, shares in zip(scores, expected, strict=True):
            count = int(row.isfinite().sum())
            assert sum(shares[: count - 1]) < 0.9 <= sum(shares[:count]) + 1e-6
        assert int(scores[0].isfinite().sum()) > 256 > int(scores[1].isfinite().sum())

    def test_rows_that_ask_for_nothing_are_left_alone(self) -> None:
        scores = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
        before = scores.clone()
        ops.penalize_repetition(scores, [1, 1.5, 1], [[1], [2, 2, 7], [3]])
        ops.mask_tokens(scores, [(), (5, 40, 99), ()])
        ops.keep_top_k(scores, [0, 9, 40], TorchOps())
        ops.keep_top_p(scores, [1, 0.8, 1], TorchOps())
        ops.keep_min_p(scores, [0, 0.1, 0])
        assert torch.equal(scores[[0, 2]], before[[0, 2]])
        assert not torch.equal(scores[1], before[1])

    def test_a_token_seen_twice_is_penalised_once(self) -> None:
        scores = self.scores(2.0, -2.0, 2.0, -2.0)
        ops.penalize_repetition(scores, [2.0], [[0, 1, 0, 1, 0]])
        assert scores.tolist() == [[1.0, -4.0, 2.0, -2.0]]

    @pytest.mark.parametrize(
        ("word", "output", "token"),
        [
            ((2,), (), 1),
            ((0, 2), (0,), 1),
            ((0, 2), (0, 1), 2),
            ((0, 2), (), 2),
            ((0, 1, 2), (2, 0, 1), 1),
            ((0, 1, 2), (0, 0, 1), 1),
            ((0, 1, 2), (1,), 2),
            ((0, 1, 2), (0, 1, 0), 2),
        ],
    )
    def test_a_bad_word_that_has_begun_is_not_ended(
        self, word: tuple[int, ...], output: tuple[int, ...], token: int
    ) -> None:
        """Of three tokens the last is the most likely, the middle one the next."""
        sampling = SamplingParams(9, temperature=0, bad_words=(word,))
        assert sampled(torch.tensor([[0.0, 1.0, 2.0]]), sequence(sampling, (0, 1), output)) == [token]

    @pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6])
    def test_a_temperature_next_to_nothing_is_greedy(self, temperature: float) -> None:
        logits = torch.tensor([[30.0, 80.0, -5.0]])
        assert sampled(logits, sequence(SamplingParams(1, temperature=temperature, seed=1))) == [1]

    def test_a_temperature_beyond_measure_is_even(self) -> None:
        rows = [sequence(SamplingParams(1, temperature=1e30, seed=seed)) for seed in range(900)]
        counts = np.bincount(sampled(torch.tensor([[50.0, 0.0, -50.0]]).expand(900, -1), *rows))
        assert counts.min() > 250


class TestShortlists:
    """Most of what is done for a row with top-k is done on few tokens; it must not show."""

    @settings(max_examples=60)
    @given(
        rows=st.lists(
            st.tuples(
                st.sampled_from([0, 1, 2, 7, 40, 299, 300, 2000]),
                st.sampled_from([0.3, 0.9, 1.0]),
                st.sampled_from([0.0, 0.2]),
                st.sampled_from([0.3, 1.0, 4.0]),
            ),
            min_size=1,
            max_size=8,
        ),
        grain=st.sampled_from([1e-6, 0.1, 1.0, 10.0]),
        seed=st.integers(0, 2**31),
    )
    def test_give_the_tokens_that_all_the_vocabulary_gives(
        self, rows: list[tuple[int, float, float, float]], grain: float, seed: int
    ) -> None:
        """A coarse grain makes equals, more of them than the candidates have room for."""
        logits = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(seed)) * 3
        logits = (logits / grain).round() * grain
        batch = [
            sequence(SamplingParams(1, temperature=heat, seed=seed + row, top_k=count, top_p=mass, min_p=share))
            for row, (count, mass, share, heat) in enumerate(rows)
        ]
        found = sampled(logits, *batch)
        assert found == [sampled(logits[row : row + 1], each)[0] for row, each in enumerate(batch)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "_MAX_CANDIDATES", 0)
            assert sampled(logits, *batch) == found

    def test_hold_what_top_k_keeps_and_are_short(self) -> None:
        scores = torch.randn(4, 1000)
        scores[1, ::3] = 5.0
        rows, places = ops.top_k_candidates(scores, [5, 5, 0, 20], TorchOps())
        assert rows == [0, 3]
        assert places.shape == (2, 40)
        assert torch.equal(places, places.sort(dim=-1).values)
        for row, count, held in zip(rows, (5, 20), places.tolist(), strict=True):
            assert set(scores[row].topk(count).indices.tolist()) <= set(held)


class TestKernels:
    @settings(max_examples=40)
    @given(asked=st.lists(ANY_SAMPLING, min_size=1, max_size=8), seed=st.integers(0, 2**31))
    def test_change_neither_tokens_nor_logprobs(self, asked: list[SamplingParams], seed: int) -> None:
        kernels = select_ops(torch.bfloat16, "cpu")
        if not kernels.name.startswith("native"):
            pytest.skip("no native kernels here")
        logits = torch.randn(len(asked), 300, generator=torch.Generator().manual_seed(seed)).bfloat16()
        batch = sampling_batch(*map(sequence, asked))
        assert Sampler(kernels)(logits, batch) == Sampler(TorchOps())(logits, batch)


def test_of_equal_logits_the_first_is_taken_and_reported() -> None:
    logits = torch.zeros(1, 500).bfloat16()
    logits[0, [70, 300, 301]] = 2.0
    one = sequence(SamplingParams(1, logprobs=5))
    assert sampled(logits, one) == [70]
    (logprobs,) = logprobs_of(logits, one)
    assert logprobs is not None
    assert [token for token, _ in logprobs.top] == [70, 300, 301, 0, 1]
