"""A server's KV events, as contents with the keys of a pool."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from kvlab.core import Request, SamplingParams
from kvlab.fleet.prefixes import HeldPrefixes, RoutedPrompt
from kvlab.kv.content_log import ContentEvent
from kvlab.peers.kv_events import EventError, _Contents

TOKENS = tuple(range(20))


class Told:
    """Batches that were told, as an EventSource."""

    def __init__(self) -> None:
        self.contents = _Contents(4)

    def take(self) -> list[ContentEvent]:
        events, self.contents.events = self.contents.events, []
        return events


def stored(names: list[Any], tokens: tuple[int, ...], parent: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": list(tokens),
            "block_size": 4} | more  # fmt: skip


def cached(told: Told, view: HeldPrefixes, salt: str | None = None) -> int:
    request = Request("a", TOKENS, SamplingParams(max_tokens=1), salt=salt)
    return view.cached_tokens(RoutedPrompt(request, "a"), 0.0)


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        ([(0, [stored([1, b"two"], TOKENS[:8])]), (1, [stored([3], TOKENS[8:12], b"two")])], 12),
        ([(0, [stored([1, 2], TOKENS[:8])]), (1, [{"type": "BlockRemoved", "block_hashes": [2, 9]}])], 4),
        ([(0, [stored([1, 2], TOKENS[:8])]), (1, [["AllBlocksCleared"]])], 0),
        ([(0, [stored([1, 2], TOKENS[:8])]), (2, [stored([3], TOKENS[8:12], 2)])], 0),  # one is missing
        ([(5, [stored([1, 2], TOKENS[:8])]), (0, [stored([1], TOKENS[:4])])], 4),  # it began again
        ([(0, [stored([3], TOKENS[8:12], 2)]), (1, [stored([1], TOKENS[:4])])], 4),  # 2 was there before
        ([(0, [stored([1], TOKENS[:4], extra_keys=[["salty"]])])], 0),
        ([(0, [stored([1], TOKENS[:4], group_idx=1)])], 0),
    ],
)
def test_what_is_known_to_be_there(batches: list[tuple[int, Any]], found: int) -> None:
    told = Told()
    view = HeldPrefixes(told, 4)
    for number, events in batches:
        told.contents.take(number, [1.0, events])
    assert cached(told, view) == found


def test_a_salt_is_part_of_a_content() -> None:
    told = Told()
    told.contents.take(0, [1.0, [stored([1, 2], TOKENS[:8], extra_keys=[["salty"], None])]])
    assert cached(told, HeldPrefixes(told, 4), "salty") == 8


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (stored([1], TOKENS[:8]) | {"block_size": 8}, "its blocks have 8 tokens, and by its metrics 4"),
        (stored([1], TOKENS[:4]) | {"token_ids": None}, "no KV event as vLLM 0.32 has them"),
        (stored([[1]], TOKENS[:4]), "no KV event as vLLM 0.32 has them"),
        ({"type": "BlockRemoved", "block_hashes": 3}, "no KV event as vLLM 0.32 has them"),
        (7, "no KV event as vLLM 0.32 has them"),
    ],
)
def test_what_is_no_event(event: Any, message: str) -> None:
    with pytest.raises(EventError, match=message):
        Told().contents.take(0, [1.0, [event]])
