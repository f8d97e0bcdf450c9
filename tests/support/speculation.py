"""A proposer that recalls outputs of an earlier run, and runs of both kinds to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvlab.config import SpeculationConfig
from kvlab.engine.speculation import PROPOSERS, Proposer


@contextmanager
def recalling(known: Sequence[Sequence[int]], wrong_every: int = 4) -> Iterator[SpeculationConfig]:
    """Settings under which the sequences that begin like a known one are proposed to go on like it, with one token
    that is wrong among so many.
    """

    class Recalling(Proposer):
        def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
            so_far, start = list(token_ids), len(token_ids)
            for tokens in known:
                if list(tokens[:start]) == so_far:
                    places = enumerate(tokens[start : start + count], start)
                    return [0 if place % wrong_every == 0 else token for place, token in places]
            return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROPOSERS._entries, "recalling", Recalling)
        yield SpeculationConfig("recalling", num_speculative_tokens=5)
