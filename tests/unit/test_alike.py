"""Which part of a block a prompt finds where many begin alike (`PrefixIndex.longest_part`)."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import pytest

from kvlab.kv.prefix import Prefix, PrefixIndex


class Tokens(bytes):
    """A node's, and how often those of any were compared."""

    times = 0

    def startswith(self, *args: Any) -> bool:
        Tokens.times += 1
        return super().startswith(*args)


def scanned(stored: Collection[Prefix], tokens: list[int], without: Collection[int]) -> tuple[int | None, int]:
    """The same, of one after the other: the block of the first that begins with most."""
    best: tuple[int | None, int] = (None, 0)
    for node in stored:
        known = memoryview(node.tokens).cast("q").tolist()
        pairs = enumerate(zip(known, tokens, strict=False))
        common = next((place for place, (one, other) in pairs if one != other), min(len(known), len(tokens)))
        is_better = common > best[1] or (common == best[1] == len(tokens) == len(known))
        if node.block not in without and is_better:
            best = node.block, common
    return best


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_first_stored_of_those_that_begin_with_most(seed: int) -> None:
    draw, index, stored = random.Random(seed), PrefixIndex(6), dict[Prefix, None]()
    root = index.root()
    anchor = root.add(index._packed([9] * 6), 0)  # so that the root stays
    for step in range(1, 400):
        tokens = [draw.choice((1, 1, 1, 1, 2)) for _ in range(draw.randint(1, 6))]
        if draw.random() < 0.4 and root.child(index._packed(tokens)) is None:
            node = root.add(index._packed(tokens), step) if len(tokens) == 6 else index.add_part(root, tokens, step)
            assert node is not None
            index.stored([node])
            stored[node] = None
        elif draw.random() < 0.15 and stored:
            node = draw.choice(list(stored))
            del stored[node]
            node.block = None
            index.prune([node])
        without = {each.block for each in stored if each.block is not None and draw.random() < 0.2}
        found, length = index.longest_part(root, tokens, None, without)
        assert (found and found.block, length) == scanned(stored, tokens, without)
    gone = list(stored)
    for node in [*gone, anchor]:
        node.block = None
    index.prune([*gone, anchor])
    assert not index._alike
    assert not index._roots


@pytest.mark.parametrize("alike", [1, 20])
def test_one_of_thousands_that_begin_alike_is_found_without_a_look_at_each(alike: int) -> None:
    index = PrefixIndex(32)
    root, before = index.root(), Tokens.times
    for number in range(2_000):
        tokens = [*range(alike), number, *range(31 - alike)]
        index.stored([root.add(Tokens(index._packed(tokens)), number)])
    found, length = index.longest_part(root, [*range(alike), 7, 0, 0], None, {7})
    assert (found and found.block, length) == (0, alike)
    found, length = index.longest_part(root, [*range(alike), 8, 0, 0], None, {7})
    assert (found and found.block, length) == (8, alike + 2)
    assert Tokens.times - before < 100
