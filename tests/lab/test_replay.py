"""Replays of traffic through the ledger: as the pool serves it, and never better than the optimum."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections import OrderedDict
from functools import cache
from itertools import accumulate, combinations
from multiprocessing.process import BaseProcess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core import Request, SamplingParams
from kvlab.errors import CapacityError, ConfigError, OutOfBlocksError
from kvlab.hashed_prompt import HashedPrompt, TokenIds
from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.lab.figures.hit_rates import hit_rate_figure
from kvlab.lab.prefix_replay import replay as replays
from kvlab.lab.prefix_replay.curves import replay_curves, show_curves
from kvlab.lab.prefix_replay.replay import BELADY, replay
from kvlab.lab.prefix_replay.reuse import reuse, reuse_distances
from kvlab.lab.prefix_replay.traffic import Traffic, read_traffic
from kvlab.lab.terminal import Terminal

SIZE = 4  # tokens of a block
POLICIES = EVICTION_POLICIES.names()


def request(number: int, tokens: list[int], *, output: int = 1, follows: int | None = None) -> Request:
    before = None if follows is None else f"r{follows}"
    return Request(f"r{number}", tuple(tokens), SamplingParams(output), 0.0, follows=before)


def prompts(seed: int, count: int, depth: int) -> list[list[int]]:
    """Prompts of up to `depth` blocks and a bit, of a few kinds of blocks, some prompts much more often."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        blocks = [chance.choices((1, 2, 3), (5, 2, 1))[0] for _ in range(chance.randint(0, depth))]
        group = min(int(chance.paretovariate(0.8)), 9)
        made.append([token for block in (group, *blocks) for token in [block] * SIZE] + [0] * chance.randint(0, 3))
    return made


def traffic_of(seed: int, count: int = 150, depth: int = 5) -> Traffic:
    return read_traffic([request(*each) for each in enumerate(prompts(seed, count, depth))], SIZE)


def served(made: list[list[int]], policy: str, num_blocks: int, concurrency: int) -> int:
    """The blocks that a pool finds which serves these prompts, with all their tokens."""
    eviction = EVICTION_POLICIES.get(policy)()
    pool = PagedKVCachePool(num_blocks, SIZE, 200, prefix_sharing=True, eviction=eviction)
    slots: list[int] = []
    found = 0
    for tokens in made:
        before = pool.counters().hit_tokens
        while True:
            try:
                if len(slots) == concurrency:
                    raise OutOfBlocksError(0, 0, 0)
                slot = pool.allocate_slot(token_ids=tokens)
                break
            except OutOfBlocksError:
                pool.free_slot(slots.pop(0))
        found += -(-(pool.counters().hit_tokens - before) // SIZE)  # the last token of a prompt is no hit
        pool.view([slot], [len(tokens) - pool.get_seq_len(slot)]).advance()
        slots.append(slot)
    return found


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_finds_what_a_pool_finds(policy: str, concurrency: int) -> None:
    for seed, num_blocks in ((0, 7), (1, 12), (2, 30)):
        made = prompts(seed, 200, 5)
        found = replay(traffic_of(seed, 200), policy, num_blocks, concurrency)
        assert found == served(made, policy, num_blocks, concurrency)
        assert found > 50


class TestReuse:
    @given(st.integers(0, 10_000), st.integers(1, 60), st.integers(0, 6))
    def test_distances_are_those_of_a_list_in_order_of_use(self, seed: int, count: int, depth: int) -> None:
        traffic = traffic_of(seed, count, depth)
        stack: list[int] = []  # the most recently used first
        expected = []
        for visit in traffic.visits:
            contents = visit.contents.tolist()
            expected += [stack.index(each) if each in stack else -1 for each in contents[: visit.looked_up]]
            stack = contents + [each for each in stack if each not in contents]
        assert reuse_distances(traffic).tolist() == expected
        found = reuse(traffic)
        assert found.first == expected.count(-1)
        assert sum(found.blocks) == len(expected) - found.first
        for edge, blocks in zip(found.edges[1:], accumulate(found.blocks), strict=True):
            assert blocks == sum(0 <= distance < edge - 1 for distance in expected)

    @pytest.mark.parametrize("num_blocks", [6, 9, 20, 50])
    def test_lru_finds_what_is_nearer_than_its_pool_is_large(self, num_blocks: int) -> None:
        whole = [tokens[: len(tokens) // SIZE * SIZE] for tokens in prompts(1, 200, 5)]
        traffic = read_traffic([request(*each) for each in enumerate(whole)], SIZE)
        distances = reuse_distances(traffic)
        assert replay(traffic, "lru", num_blocks) == ((distances >= 0) & (distances < num_blocks)).sum()


class TestBelady:
    @pytest.mark.parametrize("depth", [0, 5], ids=["prompts of one block", "prompts that branch"])
    def test_no_policy_finds_more(self, depth: int) -> None:
        least = depth + 2
        for seed in range(6):
            traffic = traffic_of(seed, depth=depth)
            for num_blocks in (least, 2 * least, 4 * least):
                for concurrency in (1, 3):
                    optimum = replay(traffic, BELADY, num_blocks, concurrency)
                    others = {name: replay(traffic, name, num_blocks, concurrency) for name in POLICIES}
                    assert max(others.values()) <= optimum <= traffic.found_at_most, (seed, num_blocks, others)

    @pytest.mark.parametrize("seed", range(12))
    def test_it_finds_what_a_search_over_all_evictions_finds(self, seed: int) -> None:
        traffic = traffic_of(seed, count=10, depth=2)
        for num_blocks in (4, 5, 6):
            assert replay(traffic, BELADY, num_blocks) == best_of_all(traffic, num_blocks)

    def test_it_finds_all_in_a_pool_that_is_never_full(self) -> None:
        traffic = traffic_of(3)
        most = traffic.contents + traffic.longest
        assert {replay(traffic, name, most) for name in (*POLICIES, BELADY)} == {traffic.found_at_most}


def best_of_all(traffic: Traffic, num_blocks: int) -> int:
    """The most blocks that can be found, by trying every choice of what to keep after each request."""
    paths = [tuple(visit.contents.tolist()) for visit in traffic.visits]

    @cache
    def best(index: int, kept: frozenset[int]) -> int:
        if index == len(paths):
            return 0
        path = paths[index]
        hits = next((place for place, content in enumerate(path) if content not in kept), len(path))
        room = num_blocks - traffic.visits[index].blocks
        others = sorted(kept - set(path))
        choices = combinations(others, min(room, len(others)))
        return hits + max(best(index + 1, frozenset(choice) | set(path)) for choice in choices)

    return best(0, frozenset())


class TestTraffic:
    def test_equal_contents_are_equal_prefixes_under_an_equal_salt(self) -> None:
        a, b = [1] * SIZE, [2] * SIZE
        salted = Request("r9", tuple(a), SamplingParams(1), salt="tenant")
        made = [request(0, a + b), request(1, b), request(2, [*a, 3]), request(3, b + a), salted]
        visits = read_traffic(made, SIZE).visits
        assert [visit.contents.tolist() for visit in visits] == [[0, 1], [2], [0], [2, 3], [4]]
        assert [visit.has_tail for visit in visits] == [False, False, True, False, False]

    def test_a_conversation_looks_up_prompt_and_output_of_its_turns(self) -> None:
        """10 + 7 tokens, of which the last is not stored; 17 + 3 + 5, again; 25 + 3."""
        made = [
            request(0, [1] * 10, output=7),
            request(1, [1] * 10, output=9),
            request(2, [2] * 3, output=5, follows=0),
            request(3, [3] * 3, follows=2),
        ]
        traffic = read_traffic(made, SIZE)
        first, other, second, third = traffic.visits
        assert [visit.blocks for visit in traffic.visits] == [4, 3, 6, 7]
        assert [visit.looked_up for visit in traffic.visits] == [2, 2, 5, 7]
        assert first.contents[:2].tolist() == other.contents.tolist()
        assert second.contents[:4].tolist() == first.contents.tolist()
        assert third.contents[:6].tolist() == second.contents.tolist()
        assert traffic.prompt_tokens == 10 + 10 + 20 + 28
        assert traffic.found_at_most == 2 + 4 + 6
        assert replay(traffic, "lru", 20) == replay(traffic, "lru", 20, concurrency=9) == 12

    def test_turns_of_several_conversations_take_turns(self) -> None:
        made = [request(0, [1]), request(1, [2], follows=0), request(2, [3]), request(3, [4], follows=2)]
        visits = read_traffic(made, 1).visits
        assert [visit.follows for visit in visits] == [None, None, visits[0], visits[1]]

    def test_what_is_found_at_most_is_each_known_prefix(self) -> None:
        made = prompts(5, 100, 5)
        known: OrderedDict[tuple[int, ...], None] = OrderedDict()
        found = 0
        for tokens in made:
            whole = [tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]
            found += sum(each in known for each in whole)
            known.update(dict.fromkeys(whole))
        assert (traffic_of(5, 100).found_at_most, traffic_of(5, 100).contents) == (found, len(known))


class TestCurves:
    def test_sizes_go_from_the_longest_request_to_all_that_is_stored(self) -> None:
        traffic = traffic_of(1)
        curves = replay_curves(traffic, "mine", ["lru"])
        assert len(curves.num_blocks) == 6
        assert (curves.num_blocks[0], curves.num_blocks[-1]) == (
            traffic.longest,
            traffic.contents + traffic.longest,
        )
        assert list(curves.hit_rates) == ["lru", BELADY]
        assert curves.hit_rates["lru"][-1] == curves.hit_rates[BELADY][-1] == curves.ceiling

    def test_a_narrow_terminal_cuts_no_figure(self, capsys: pytest.CaptureFixture[str]) -> None:
        curves = replay_curves(traffic_of(1), "mine", [*POLICIES])
        show_curves(curves, Terminal(width=40))
        printed = capsys.readouterr().out
        assert all(name in printed for name in (*POLICIES, "best / belady"))
        assert "\u2026" not in printed

    def test_prompts_shorter_than_a_block_are_drawn(self) -> None:
        traffic = read_traffic([request(0, [1] * (SIZE - 1))], SIZE)
        (_, below) = hit_rate_figure(replay_curves(traffic, "mine", ["lru"])).axes
        assert "no block comes again" in [text.get_text() for text in below.texts]

    def test_a_pool_that_is_too_small_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"kv.num_blocks=3: .* takes 7 blocks of 4 tokens; kv.num_blocks=7"):
            replay_curves(traffic_of(1), "mine", ["lru"], [3, 40])


class TestProcesses:
    @pytest.fixture(autouse=True)
    def _worth_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replays, "_WORTH", 0)
        self.others = multiprocessing.active_children()  # such as joblib's, which wait for more to do

    def left(self) -> list[BaseProcess]:
        return [each for each in multiprocessing.active_children() if each not in self.others]

    def test_find_what_one_finds(self) -> None:
        traffic, done = traffic_of(1), list[tuple[int, int]]()
        alone = replay_curves(traffic, "mine", POLICIES)
        together = replay_curves(traffic, "mine", POLICIES, cores=2, on_replay=lambda *each: done.append(each))
        assert together == alone
        assert done[-1][0] == done[-1][1] > len(POLICIES)

    @pytest.mark.skipif(sys.platform != "linux", reason="there are no processes")
    def test_one_that_is_killed_is_a_sentence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replays, "replay", lambda *each: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(CapacityError, match=r"take fewer or smaller kv\.num_blocks"):
            replay_curves(traffic_of(1), "mine", ["lru"], cores=2)
        assert not self.left()

    @pytest.mark.skipif(sys.platform != "linux", reason="there are no processes")
    def test_an_error_ends_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parent = os.getpid()

        def interrupted(done: int, of: int) -> None:
            if done:
                raise KeyboardInterrupt

        def slow(traffic: Traffic, policy: str, num_blocks: int, concurrency: int) -> int:
            time.sleep(0 if num_blocks > 60 else 60)
            return 0

        monkeypatch.setattr(replays, "replay", slow)
        with pytest.raises(KeyboardInterrupt):
            replay_curves(traffic_of(1), "mine", ["lru"], [60, 61], cores=2, on_replay=interrupted)
        assert os.getpid() == parent
        assert not self.left()

    def test_are_as_many_as_cores_and_memory_allow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[int] = []

        def begin(work: object, tasks: object, processes: int, *, killed: str) -> list[object]:
            started.append(processes)
            return []

        monkeypatch.setattr(replays, "in_processes", begin)
        traffic, tasks = traffic_of(1), [replays.Task("lru", size) for size in (10_000, 20_000)]
        for memory in (None, 45_000_000, 30_000_000):
            list(replays.replay_all(traffic, tasks, 1, cores=8, memory=memory))
        assert started == [8, 2, 1]


def test_prompts_that_are_known_by_ids_are_not_made_into_tokens() -> None:
    chance = random.Random(0)
    hashed: list[TokenIds] = [
        HashedPrompt([chance.choice((7, 8, 9)) for _ in range(4)], 32, chance.randint(97, 128), 1000, 5)
        for _ in range(40)
    ]
    for size in (16, 32):
        ids, tokens = (
            read_traffic(
                [Request(f"r{n}", prompt, SamplingParams(1)) for n, prompt in enumerate(prompts)],
                size,
            )
            for prompts in (hashed, [prompt[:] for prompt in hashed])
        )
        assert [visit.contents.tolist() for visit in ids.visits] == [v.contents.tolist() for v in tokens.visits]
        assert (ids.prompt_tokens, ids.contents, ids.found_at_most) == (
            tokens.prompt_tokens,
            tokens.contents,
            tokens.found_at_most,
        )
