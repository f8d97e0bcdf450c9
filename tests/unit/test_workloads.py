from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.config import LengthConfig, WorkloadConfig
from kvlab.core import Request
from kvlab.workloads import build_requests
from kvlab.workloads.describe import workload_digest
from kvlab.workloads.prompts import grown_lengths

Shape = tuple[int, int, float]


def synthetic(**values: object) -> WorkloadConfig:
    settings: dict[str, object] = {
        "num_requests": 12,
        "prompt_len": LengthConfig(5, 30),
        "output_len": LengthConfig(2, 20),
    }
    return WorkloadConfig(**(settings | values))  # type: ignore[arg-type]


def shapes(requests: list[Request]) -> list[Shape]:
    return [(len(r.prompt_token_ids), r.sampling.max_tokens, r.arrival_s) for r in requests]


class TestSynthetic:
    def test_the_same_seed_gives_the_same_requests(self) -> None:
        first, second = (build_requests(synthetic(), vocab_size=1000, seed=7) for _ in range(2))
        assert first == second

    def test_another_seed_gives_others(self) -> None:
        first, second = (build_requests(synthetic(), vocab_size=1000, seed=seed) for seed in (7, 8))
        assert shapes(first) != shapes(second)
        assert all(a.prompt_token_ids != b.prompt_token_ids for a, b in zip(first, second, strict=True))
        assert not {a.sampling.seed for a in first} & {b.sampling.seed for b in second}

    def test_the_vocabulary_does_not_change_the_lengths(self) -> None:
        """Nor those whose tokens take no random number to draw, or more than one."""
        one, small, large, huge = (
            build_requests(synthetic(), vocab_size=size, seed=7) for size in (1, 10, 150_000, 3_000_000_000)
        )
        assert shapes(one) == shapes(small) == shapes(large) == shapes(huge)

    def test_one_request_more_leaves_the_others_as_they_are(self) -> None:
        fewer, more = (build_requests(synthetic(num_requests=n), vocab_size=1000, seed=7) for n in (12, 13))
        assert more[:12] == fewer

    def test_lengths_with_a_heavy_tail(self) -> None:
        tail = LengthConfig(1, 512, "lognormal", median=64, sigma=1.2)
        requests = build_requests(synthetic(num_requests=2000, output_len=tail), vocab_size=10, seed=7)
        lengths = sorted(r.sampling.max_tokens for r in requests)
        assert lengths[0] >= 1
        assert lengths[-1] == 512  # cut off
        assert lengths[1000] == pytest.approx(64, rel=0.1)
        assert lengths[round(2000 * 0.841)] == pytest.approx(64 * math.exp(1.2), rel=0.15)  # a sigma above
        assert lengths[round(2000 * 0.159)] == pytest.approx(64 / math.exp(1.2), rel=0.15)

    def test_poisson_arrivals(self) -> None:
        config = synthetic(num_requests=4000, arrival="poisson", rate=5.0)
        times = [r.arrival_s for r in build_requests(config, vocab_size=10, seed=7)]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert times == sorted(times)
        assert sum(gaps) / len(gaps) == pytest.approx(0.2, rel=0.05)
        assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), rel=0.05)

    @pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
    def test_gamma_arrivals_have_the_rate_and_the_spread_that_burstiness_says(self, burstiness: float) -> None:
        config = synthetic(num_requests=4000, arrival="gamma", rate=5.0, burstiness=burstiness)
        times = [r.arrival_s for r in build_requests(config, vocab_size=10, seed=7)]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert sum(gaps) / len(gaps) == pytest.approx(0.2, rel=0.1)
        assert stdev(gaps) / (sum(gaps) / len(gaps)) == pytest.approx(burstiness**-0.5, rel=0.1)

    def test_priorities_are_drawn_evenly_and_change_nothing_else(self) -> None:
        plain, drawn = (
            build_requests(synthetic(num_requests=900, priorities=count), vocab_size=50, seed=7) for count in (1, 3)
        )
        assert {r.priority for r in plain} == {0}
        assert all(count == pytest.approx(300, rel=0.2) for count in Counter(r.priority for r in drawn).values())
        assert [replace(r, priority=0) for r in drawn] == plain
        assert workload_digest(plain) != workload_digest(drawn)

    def test_requests_have_ids_seeds_and_prompts_of_their_own(self) -> None:
        requests = build_requests(synthetic(), vocab_size=1000, seed=7)
        assert len({r.request_id for r in requests}) == len({r.sampling.seed for r in requests}) == 12
        assert len({r.prompt_token_ids for r in requests}) == 12

    def test_a_burst_arrives_at_once(self) -> None:
        assert {r.arrival_s for r in build_requests(synthetic(), vocab_size=10, seed=0)} == {0.0}

    def test_uniform_arrivals_are_evenly_spaced_from_the_start(self) -> None:
        config = synthetic(arrival="uniform", rate=4.0, num_requests=5)
        requests = build_requests(config, vocab_size=10, seed=0)
        assert [r.arrival_s for r in requests] == [0.0, 0.25, 0.5, 0.75, 1.0]

    def test_the_arrival_process_does_not_change_the_requests(self) -> None:
        burst = build_requests(synthetic(), vocab_size=10, seed=0)
        uniform = build_requests(synthetic(arrival="uniform", rate=2.0), vocab_size=10, seed=0)
        assert [r.prompt_token_ids for r in burst] == [r.prompt_token_ids for r in uniform]

    def test_both_ends_of_a_range_occur_and_nothing_beyond(self) -> None:
        config = synthetic(num_requests=200, prompt_len=LengthConfig(3, 5), output_len=LengthConfig(1, 2))
        requests = build_requests(config, vocab_size=3, seed=0)
        assert {len(r.prompt_token_ids) for r in requests} == {3, 4, 5}
        assert {r.sampling.max_tokens for r in requests} == {1, 2}
        assert {token for r in requests for token in r.prompt_token_ids} == {0, 1, 2}

    def test_a_range_of_one_length_is_that_length(self) -> None:
        config = synthetic(prompt_len=LengthConfig(9, 9), output_len=LengthConfig(4, 4))
        assert set(shapes(build_requests(config, vocab_size=10, seed=0))) == {(9, 4, 0.0)}

    def test_sampling_is_that_of_the_workload(self) -> None:
        config = synthetic(temperature=0.7, ignore_eos=False)
        for request in build_requests(config, vocab_size=10, seed=0):
            assert (request.sampling.temperature, request.sampling.ignore_eos) == (0.7, False)


def test_groups_may_be_tenants_that_pin_what_they_begin_with() -> None:
    config = WorkloadConfig(system_len=4, num_groups=3, group_len=2, turns=2, salt_groups=True, pin_prefix=True)
    requests = build_requests(config, vocab_size=100, seed=0)
    first = [request for request in requests if request.follows is None]
    assert {request.salt for request in first} == {0, 1, 2}
    assert len({(request.salt, tuple(request.prompt_token_ids)[:6]) for request in first}) == 3
    assert {request.pin_tokens for request in requests} == {6}


@given(
    low=st.integers(1, 50),
    spread=st.integers(0, 50),
    seed=st.integers(0, 2**32),
    vocab_size=st.integers(1, 200_000),
)
def test_any_range_and_vocabulary_are_kept_to(low: int, spread: int, seed: int, vocab_size: int) -> None:
    config = synthetic(prompt_len=LengthConfig(low, low + spread), output_len=LengthConfig(low, low + spread))
    for request in build_requests(config, vocab_size=vocab_size, seed=seed):
        assert low <= len(request.prompt_token_ids) <= low + spread
        assert low <= request.sampling.max_tokens <= low + spread
        assert all(0 <= token < vocab_size for token in request.prompt_token_ids)


class TestSharedPrefixes:
    def build(self, **values: object) -> list[Request]:
        settings: dict[str, object] = {"num_requests": 300, "system_len": 7, "group_len": 5, "num_groups": 4}
        return build_requests(synthetic(**(settings | values)), vocab_size=1000, seed=3)

    def test_a_prompt_is_that_of_all_that_of_its_group_and_its_own(self) -> None:
        requests = self.build()
        assert len({r.prompt_token_ids[:7] for r in requests}) == 1
        assert len({r.prompt_token_ids[7:12] for r in requests}) == 4
        assert len({r.prompt_token_ids[12:] for r in requests}) == 300
        assert {len(r.prompt_token_ids) for r in requests} == set(range(12 + 5, 12 + 31))

    def test_a_group_is_the_more_popular_the_earlier_it_is(self) -> None:
        counts = [n for _, n in Counter(r.prompt_token_ids[7:12] for r in self.build(zipf=1.0)).most_common()]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] > 2 * counts[-1]
        steep = Counter(r.prompt_token_ids[7:12] for r in self.build(zipf=3.0)).most_common(1)[0][1]
        assert steep > counts[0]

    def test_popularity_without_a_slope_is_even(self) -> None:
        counts = Counter(r.prompt_token_ids[7:12] for r in self.build(zipf=0.0)).values()
        assert min(counts) > 0.6 * max(counts)

    def test_popularity_and_groups_do_not_change_the_lengths(self) -> None:
        own = [shapes(self.build(zipf=zipf)) for zipf in (0.0, 2.0)]
        assert own[0] == own[1]


class TestConversations:
    def test_turns_follow_one_another_after_a_pause(self) -> None:
        requests = build_requests(
            synthetic(num_requests=5, turns=3, think_s=2.5, system_len=6), vocab_size=1000, seed=3
        )
        assert len(requests) == 15
        first = [r for r in requests if r.follows is None]
        assert len(first) == 5
        assert [r.arrival_s for r in requests if r.follows is not None] == [2.5] * 10
        by_id = {r.request_id: r for r in requests}
        for request in first:
            chain = [request]
            while (nxt := next((r for r in requests if r.follows == chain[-1].request_id), None)) is not None:
                chain.append(nxt)
            assert len(chain) == 3
            assert request.prompt_token_ids[:6] == first[0].prompt_token_ids[:6]
            assert all(turn.prompt_token_ids[:6] != first[0].prompt_token_ids[:6] for turn in chain[1:])
        assert len(by_id) == 15
        order = [r.request_id for r in requests]
        assert all(order.index(r.follows) < order.index(r.request_id) for r in requests if r.follows)

    def test_grown_lengths_count_all_that_was_said(self) -> None:
        requests = build_requests(synthetic(num_requests=2, turns=3), vocab_size=1000, seed=3)
        lengths = grown_lengths(requests)
        for request in requests:
            before = lengths[request.follows] if request.follows else 0
            assert lengths[request.request_id] == before + request.max_total_tokens

    def test_samples_are_those_of_the_workload(self) -> None:
        assert {r.sampling.n for r in build_requests(synthetic(samples=3), vocab_size=10, seed=0)} == {3}


class TestDigest:
    @pytest.mark.parametrize("values", [{"samples": 4}, {"turns": 2}, {"system_len": 3}, {"group_len": 3}], ids=str)
    def test_separates_workloads_that_serve_other_requests(self, values: dict[str, object]) -> None:
        first, second = (
            workload_digest(build_requests(synthetic(**each), vocab_size=50, seed=1)) for each in ({}, values)
        )
        assert first != second

    def test_separates_turns_from_requests_of_their_own(self) -> None:
        requests = build_requests(synthetic(num_requests=1, turns=2), vocab_size=50, seed=1)
        alone = [replace(request, follows=None) for request in requests]
        assert workload_digest(requests) != workload_digest(alone)
