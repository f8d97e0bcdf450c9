"""The keys of a prompt's blocks, which are made when they are read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvlab.fleet.prefixes import BlockKeys
from kvlab.kv.tiers.base import Key

PROMPT = bytes(range(42))  # five blocks of 8 bytes, and a part of a sixth


def keys(most: int = 9) -> BlockKeys:
    return BlockKeys(PROMPT, 8, "ann", most)


@given(most=st.integers(0, 7), reads=st.lists(st.one_of(st.integers(-5, 4), st.slices(5), st.none())))
def test_are_the_same_in_whichever_order_they_are_read(most: int, reads: list[int | slice | None]) -> None:
    every, read = [keys(count + 1)[count] for count in range(min(most, 5))], keys(most)
    for place in reads:
        if place is None:
            assert list(read) == every
        elif isinstance(place, slice) or -len(every) <= place < len(every):
            assert read[place] == every[place]
    assert len(read) == len(every) == len(set(every))


def test_depend_on_all_that_precedes_them() -> None:
    other: list[Key] = list(BlockKeys(b"\xff" + PROMPT[1:], 8, "ann", 9))
    assert not set(other) & set(keys())
