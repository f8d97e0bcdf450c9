from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.config import LengthConfig, WorkloadConfig
from kvlab.core import Request
from kvlab.errors import WorkloadError
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


def read(path: Path, text: str | bytes, *, vocab_size: int = 100, seed: int = 0) -> list[Request]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    config = WorkloadConfig(source="jsonl", path=str(path))
    return build_requests(config, vocab_size=vocab_size, seed=seed)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


GOOD = '{"prompt_token_ids": [1, 2, 3], "max_tokens": 4}\n'


class TestJsonLines:
    def test_reads_prompts_as_they_are(self, path: Path) -> None:
        (request,) = read(path, '{"prompt_token_ids": [0, 99, 5], "max_tokens": 4, "arrival_s": 1.5}')
        assert request.prompt_token_ids == (0, 99, 5)
        assert (request.sampling.max_tokens, request.arrival_s) == (4, 1.5)

    def test_draws_prompts_of_a_given_length(self, path: Path) -> None:
        line = '{"prompt_tokens": 20, "max_tokens": 4}\n'
        first, second = read(path, line * 2)
        assert len(first.prompt_token_ids) == len(second.prompt_token_ids) == 20
        assert first.prompt_token_ids != second.prompt_token_ids
        assert read(path, line * 2) == [first, second]
        assert read(path, line, seed=1)[0].prompt_token_ids != first.prompt_token_ids
        assert set(read(path, '{"prompt_tokens": 500, "max_tokens": 4}', vocab_size=3)[0].prompt_token_ids) == {
            0,
            1,
            2,
        }

    def test_arrives_at_the_start_unless_it_says_otherwise(self, path: Path) -> None:
        assert [r.arrival_s for r in read(path, GOOD)] == [0.0]

    def test_has_no_priority_unless_it_says_so(self, path: Path) -> None:
        urgent = '{"prompt_tokens": 2, "max_tokens": 1, "priority": -3}'
        assert [r.priority for r in read(path, f"{GOOD}{urgent}")] == [0, -3]
        with pytest.raises(WorkloadError, match=r"line 1: .*priority='high'; must be a whole number"):
            read(path, urgent.replace("-3", '"high"'))

    def test_skips_empty_lines(self, path: Path) -> None:
        assert [r.request_id for r in read(path, f"\n{GOOD}  \n{GOOD}")] == ["r0", "r1"]

    def test_sorts_by_arrival_and_keeps_the_order_of_those_that_arrive_together(self, path: Path) -> None:
        lines = [f'{{"prompt_tokens": 2, "max_tokens": 1, "arrival_s": {at}}}' for at in (3, 1, 2.5, 1, 0)]
        requests = read(path, "\n".join(lines))
        assert [(r.request_id, r.arrival_s) for r in requests] == [
            ("r4", 0),
            ("r1", 1),
            ("r3", 1),
            ("r2", 2.5),
            ("r0", 3),
        ]

    def test_takes_a_home_directory(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(path.parent))
        path.write_text(GOOD)
        config = WorkloadConfig(source="jsonl", path=f"~/{path.name}")
        assert len(build_requests(config, vocab_size=10, seed=0)) == 1

    def test_sampling_is_that_of_the_workload(self, path: Path) -> None:
        path.write_text(GOOD)
        config = WorkloadConfig(source="jsonl", path=str(path), temperature=0.7, ignore_eos=False)
        (request,) = build_requests(config, vocab_size=10, seed=0)
        assert (request.sampling.temperature, request.sampling.ignore_eos) == (0.7, False)

    def test_a_line_may_say_how_its_tokens_are_sampled(self, path: Path) -> None:
        said = '"temperature": 0.7, "top_p": 0.9, "seed": 5, "n": 2, "stop_token_ids": [3, 4], "ignore_eos": false'
        first, second = read(path, f'{{"prompt_tokens": 2, "max_tokens": 4, {said}}}\n{GOOD}')
        sampling = first.sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.n) == (0.7, 0.9, 5, 2)
        assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.max_tokens) == ((3, 4), False, 4)
        assert (second.sampling.temperature, second.sampling.n, second.sampling.ignore_eos) == (0.0, 1, True)

    def test_a_line_may_say_whose_it_is_and_what_it_pins(self, path: Path) -> None:
        said = '{"prompt_tokens": 5, "max_tokens": 1, "salt": "ann", "pin_tokens": 4}'
        first, second = read(path, f"{said}\n{GOOD}")
        assert (first.salt, first.pin_tokens, second.salt, second.pin_tokens) == ("ann", 4, None, 0)


def test_groups_may_be_tenants_that_pin_what_they_begin_with() -> None:
    config = WorkloadConfig(system_len=4, num_groups=3, group_len=2, turns=2, salt_groups=True, pin_prefix=True)
    requests = build_requests(config, vocab_size=100, seed=0)
    first = [request for request in requests if request.follows is None]
    assert {request.salt for request in first} == {0, 1, 2}
    assert len({(request.salt, tuple(request.prompt_token_ids)[:6]) for request in first}) == 3
    assert {request.pin_tokens for request in requests} == {6}


BAD_LINES = {
    "not JSON": ("{oops", "Expecting property name"),
    "cut off": ('{"prompt_tokens": 3, "max_tokens":', "Expecting value"),
    "a list": ("[1, 2]", "not a JSON object"),
    "a number": ("7", "not a JSON object"),
    "null": ("null", "not a JSON object"),
    "unknown field": (
        '{"prompt_tokens": 3, "max_tokens": 1, "prompts": "hi"}',
        "unknown field 'prompts'; known: arrival_s",
    ),
    "no prompt": (
        '{"max_tokens": 1}',
        "needs one of prompt_token_ids, prompt_tokens, prompt, messages; it has none",
    ),
    "two prompts": (
        '{"prompt_tokens": 1, "prompt_token_ids": [1], "max_tokens": 1}',
        "it has prompt_token_ids and prompt_tokens",
    ),
    "text and token ids": (
        '{"prompt": "hi", "prompt_token_ids": [1], "max_tokens": 1}',
        "needs one of prompt_token_ids, prompt_tokens, prompt, messages; it has prompt_token_ids and prompt",
    ),
    "text and messages": ('{"prompt": "hi", "messages": [], "max_tokens": 1}', "it has prompt and messages"),
    "empty text": ('{"prompt": "", "max_tokens": 1}', "prompt='': must be a text, and not empty"),
    "text that is none": ('{"prompt": 5, "max_tokens": 1}', "prompt=5: must be a text, and not empty"),
    "no messages": ('{"messages": [], "max_tokens": 1}', "messages=[]: must be a list of at least one"),
    "message without role": ('{"messages": [{"content": "a"}], "max_tokens": 1}', "must be a list of at least one"),
    "message of parts": (
        '{"messages": [{"role": "user", "content": [1]}], "max_tokens": 1}',
        "must be a list of at least one",
    ),
    "text without a tokenizer": ('{"prompt": "hi", "max_tokens": 1}', "needs text, and there is no tokenizer here"),
    "no max_tokens": ('{"prompt_tokens": 3}', "max_tokens=None: must be a whole number"),
    "max_tokens 0": ('{"prompt_tokens": 3, "max_tokens": 0}', "max_tokens=0: must be a whole number, at least 1"),
    "max_tokens true": ('{"prompt_tokens": 3, "max_tokens": true}', "max_tokens=True: must be"),
    "max_tokens 1.5": ('{"prompt_tokens": 3, "max_tokens": 1.5}', "max_tokens=1.5: must be"),
    "max_tokens text": ('{"prompt_tokens": 3, "max_tokens": "4"}', "max_tokens='4': must be"),
    "prompt_tokens 0": ('{"prompt_tokens": 0, "max_tokens": 1}', "prompt_tokens=0: must be"),
    "prompt_tokens null": ('{"prompt_tokens": null, "max_tokens": 1}', "prompt_tokens=None: must be"),
    "empty prompt": ('{"prompt_token_ids": [], "max_tokens": 1}', "a list of at least one token id"),
    "prompt of text": ('{"prompt_token_ids": "hello", "max_tokens": 1}', "a list of at least one token id"),
    "prompt of fractions": ('{"prompt_token_ids": [1, 2.0], "max_tokens": 1}', "a list of at least one token id"),
    "prompt of booleans": ('{"prompt_token_ids": [true], "max_tokens": 1}', "a list of at least one token id"),
    "token too large": (
        '{"prompt_token_ids": [1, 100], "max_tokens": 1}',
        "100 is outside the model's vocabulary of 100",
    ),
    "token negative": ('{"prompt_token_ids": [-1], "max_tokens": 1}', "-1 is outside the model's vocabulary"),
    "arrival negative": ('{"prompt_tokens": 1, "max_tokens": 1, "arrival_s": -0.5}', "arrival_s=-0.5: must be"),
    "arrival infinite": ('{"prompt_tokens": 1, "max_tokens": 1, "arrival_s": Infinity}', "arrival_s=inf: must be"),
    "arrival not a number": ('{"prompt_tokens": 1, "max_tokens": 1, "arrival_s": NaN}', "arrival_s=nan: must be"),
    "arrival text": ('{"prompt_tokens": 1, "max_tokens": 1, "arrival_s": "0"}', "arrival_s='0': must be"),
    "arrival true": ('{"prompt_tokens": 1, "max_tokens": 1, "arrival_s": true}', "arrival_s=True: must be"),
    "temperature negative": (
        '{"prompt_tokens": 1, "max_tokens": 1, "temperature": -1}',
        "temperature=-1; a number",
    ),
    "top_p text": ('{"prompt_tokens": 1, "max_tokens": 1, "top_p": "0.5"}', "top_p='0.5'; a number in (0, 1]"),
    "stop token outside": (
        '{"prompt_tokens": 1, "max_tokens": 1, "stop_token_ids": [100]}',
        "stop_token_ids=(100,)",
    ),
    "stop strings": ('{"prompt_tokens": 1, "max_tokens": 1, "stop": ["."]}', "needs text"),
    "salt": ('{"prompt_tokens": 1, "max_tokens": 1, "salt": 1.5}', "salt=1.5: must be text or a whole number"),
    "pins too many": (
        '{"prompt_tokens": 3, "max_tokens": 1, "pin_tokens": 4}',
        "pin_tokens=4; must be a whole number of the prompt's first tokens, from 0 to 3",
    ),
    "pins text": (
        '{"prompt_tokens": 3, "max_tokens": 1, "pin_tokens": "2"}',
        "pin_tokens='2'; must be",
    ),
    "arrival null": ('{"prompt_tokens": 1, "max_tokens": 1, "arrival_s": null}', "arrival_s=None: must be"),
}


class TestMalformedFiles:
    @pytest.mark.parametrize(("line", "reason"), BAD_LINES.values(), ids=list(BAD_LINES))
    def test_a_bad_line_is_named_by_number_with_what_is_wrong(self, path: Path, line: str, reason: str) -> None:
        with pytest.raises(WorkloadError) as caught:
            read(path, f"{GOOD}\n{GOOD}{line}\n{GOOD}")
        assert str(caught.value).startswith(f"{path}, line 4: ")
        assert reason in str(caught.value)

    def test_an_arrival_beyond_any_number_of_seconds(self, path: Path) -> None:
        with pytest.raises(WorkloadError, match="line 1: arrival_s"):
            read(path, f'{{"prompt_tokens": 1, "max_tokens": 1, "arrival_s": 1{"0" * 400}}}')

    def test_a_file_that_is_not_there(self, path: Path) -> None:
        config = WorkloadConfig(source="jsonl", path=str(path))
        with pytest.raises(WorkloadError, match=f"workload.path={path}: cannot be read: No such file"):
            build_requests(config, vocab_size=10, seed=0)

    def test_a_directory(self, tmp_path: Path) -> None:
        config = WorkloadConfig(source="jsonl", path=str(tmp_path))
        with pytest.raises(WorkloadError, match="cannot be read: Is a directory"):
            build_requests(config, vocab_size=10, seed=0)

    @pytest.mark.parametrize("text", ["", "\n \n"], ids=["empty", "blank"])
    def test_a_file_without_a_request(self, path: Path, text: str) -> None:
        with pytest.raises(WorkloadError, match="holds no request"):
            read(path, text)

    def test_a_file_that_is_not_text(self, path: Path) -> None:
        with pytest.raises(WorkloadError, match="it is not UTF-8 text"):
            read(path, b"\xff\xfe\x00")


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
