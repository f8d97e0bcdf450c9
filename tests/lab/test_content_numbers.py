"""A number for each content is what a dict would have, in a part of its memory."""

from __future__ import annotations

import random

import numpy as np

from kvlab.kv.tiers.base import key_behind
from kvlab.lab.run.content_numbers import ContentNumbers


def test_numbers_are_those_of_a_dict_in_little_memory() -> None:
    chance, numbers = random.Random(5), ContentNumbers()
    keys = [key_behind(b"", str(number).encode()) for number in range(30_000)]
    known: dict[bytes, int] = {}
    for at in range(400):
        asked = chance.choices(keys[: 75 * at + 1], k=chance.choice([0, 1, 2, 40, 700]))  # some of them twice
        places = numbers.places(asked)
        assert numbers.numbers[places].tolist() == [known.get(key, 0) for key in asked]
        numbers.numbers[places] = at + 1
        known.update(dict.fromkeys(asked, at + 1))
    assert len(known) > 20_000
    assert np.count_nonzero(numbers.numbers) == len(known)
    assert len(numbers.numbers) <= 4 * len(known)
