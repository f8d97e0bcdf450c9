"""A grammar of token ids that can be read at a glance, for tests of what follows one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import GrammarError
from tests.support.model import VOCAB

END = 7


class Alternating:
    """Even and odd tokens in turn, at least `least` of them before END; more than `most` are too many for it."""

    def __init__(self, least: int = 3, most: int = 1000) -> None:
        self.least, self.most = least, most
        self.calls = 0

    def start(self) -> Alternating:
        return self

    def allowed(self, output: Sequence[int]) -> NDArray[np.bool_] | None:
        self.calls += 1
        if not self.follows(output):
            return None
        if len(output) >= self.most:
            raise GrammarError("its grammar cannot be followed: too long")
        found = np.ones(VOCAB, dtype=np.bool_)
        if output:
            found[output[-1] % 2 :: 2] = False
        found[END] = len(output) >= self.least
        return found

    def follows(self, output: Sequence[int]) -> bool:
        return END not in output and all((one + other) % 2 for one, other in pairwise(output))
