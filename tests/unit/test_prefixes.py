"""What prompts have in common, against an engine whose memory holds everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvlab.config import LengthConfig, WorkloadConfig
from kvlab.core import Request, SamplingParams
from kvlab.engine.clock import LogicalClock
from kvlab.hashed_prompt import HashedPrompt
from kvlab.lab.run.drive import drive
from kvlab.workloads import build_requests
from kvlab.workloads.prefixes import prefix_tree
from tests.support.engines import make_engine
from tests.support.executors import RecordingExecutor
from tests.support.model import VOCAB, tiny_config
from tests.support.pools import paged

CHAINS = ((0, 1, 2), (0, 1, 3), (0, 1, 2), (4, 1, 2), (0, 5), (0, 1, 2), (0,))
LENGTHS = (48, 41, 39, 48, 23, 44, 16)


def hashed(block_tokens: int = 16) -> list[Request]:
    prompts = (HashedPrompt(ids, block_tokens, size, VOCAB, 7) for ids, size in zip(CHAINS, LENGTHS, strict=True))
    return [Request(f"r{number}", prompt, SamplingParams(2)) for number, prompt in enumerate(prompts)]


def served(requests: list[Request]) -> list[int]:
    """The prompt tokens of each that an engine finds in its cache, one request after another."""
    pool = paged(400, max_seq_len=400, spec=tiny_config().kv_spec("float32"), sharing=True)
    log = drive(make_engine(pool, RecordingExecutor(), LogicalClock()), requests, concurrency=1)
    assert log.completed == len(log.records)
    return [record.cached_tokens for record in log.records]


def test_repeated_blocks_are_those_an_endless_cache_finds() -> None:
    tree = prefix_tree(hashed(), 4)
    assert tree.repeated == [0, 8, 9, 0, 4, 11, 4]
    assert tree.hit_tokens == served(hashed()) == [0, 32, 36, 0, 16, 43, 15]
    assert tree.repeated_share == pytest.approx(36 / 63)
    assert tree.most_hit_rate == pytest.approx(142 / 259)


@pytest.mark.parametrize("block_size", [4, 16, 3, 7, 32])
def test_ids_and_their_tokens_give_the_same_tree(block_size: int) -> None:
    tokens = [replace(each, prompt_token_ids=tuple(each.prompt_token_ids)) for each in hashed()]
    assert prefix_tree(hashed(), block_size) == prefix_tree(tokens, block_size)


def test_requests_of_two_salts_share_nothing() -> None:
    salted = [replace(each, salt=number) for number, each in enumerate(hashed())]
    assert prefix_tree(salted, 4).repeated == [0] * 7


@pytest.mark.parametrize(
    "values",
    [{"turns": 3}, {"system_len": 9, "num_groups": 3, "group_len": 10, "num_requests": 12}, {"samples": 2}],
    ids=str,
)
def test_no_run_finds_more_than_the_tree_says(values: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"prompt_len": LengthConfig(5, 20), "output_len": LengthConfig(2, 9)}
    config = WorkloadConfig(**({"num_requests": 6} | settings | values))
    requests = build_requests(config, vocab_size=VOCAB, seed=3)
    pool = paged(600, max_seq_len=400, spec=tiny_config().kv_spec("float32"), sharing=True)
    log = drive(make_engine(pool, RecordingExecutor(), LogicalClock()), requests)
    assert log.completed == len(log.records)
    found = {record.request_id: record.cached_tokens for record in log.records if record.sample == 0}
    tree = prefix_tree(requests, 4)
    assert sum(found.values()) == sum(tree.hit_tokens)
