"""Proposals by lookup: what followed the newest tokens when they occurred before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.config import SpeculationConfig
from kvlab.engine.speculation import NgramProposer


def proposer(least: int, most: int) -> NgramProposer:
    return NgramProposer(SpeculationConfig("ngram", prompt_lookup_min=least, prompt_lookup_max=most))


@pytest.mark.parametrize(
    ("token_ids", "count", "proposed", "why"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4], "what followed"),
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4], "the latest place counts"),
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1, [3], "a longer match goes before a later one"),
        ([1, 2, 3, 4], 3, [], "nothing occurred before"),
        ([5, 1, 6, 1], 3, [], "a match that is too short"),
        ([1, 2], 3, [], "no place before the end"),
        ([1], 3, [], "fewer tokens than a match needs"),
        ([9, 9, 9], 4, [9, 9, 9, 9], "a copy that reaches the end goes on with what it has copied"),
        ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1], "as does one of a longer period"),
    ],
)
def test_what_is_proposed(token_ids: list[int], count: int, proposed: list[int], why: str) -> None:
    assert proposer(2, 3).propose(token_ids, count) == proposed, why


def by_the_book(token_ids: list[int], count: int, least: int, most: int) -> list[int]:
    for length in range(most, least - 1, -1):
        for end in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[end - length : end] == token_ids[-length:]:
                copy = list(token_ids)
                for place in range(end, end + count):
                    copy.append(copy[place])
                return copy[len(token_ids) :]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.lists(st.integers(1, 5), max_size=12),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_a_sequence_that_grows_is_looked_up_as_by_the_book(
    token_ids: list[int], growth: list[int], least: int, more: int
) -> None:
    found, known = proposer(least, least + more), 1
    for count in [*growth, len(token_ids)]:
        known = min(known + count, len(token_ids))
        tokens = token_ids[:known]
        assert found.propose(tokens, count) == by_the_book(tokens, count, least, least + more)
