"""`make soak`: a round that fails stops no other, and comes with the command that does it again."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from experiments.soak.run import attack, pools, table
from tests.property.fuzz import CONFIGS, FuzzFailure, run
from tests.property.pool_machine import PoolMachine


def test_a_failure_is_kept_and_the_rounds_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Counter[str]:
        with monkeypatch.context() as patch:
            patch.setattr(PoolMachine, "too_long", lambda *_: False)
            run(5, 500, CONFIGS["paged4-private-int8-NHD"])
        return Counter()

    rounds = [("sound", lambda: Counter({"operations": 1})), ("broken", broken)] * 2
    part = attack("pools", iter(rounds), seconds=60)
    assert (part.rounds, part.done) == (4, {"operations": 2})
    assert len(part.failures) == 2
    assert (
        "-m experiments.soak.run pools --config paged4-private-int8-NHD --seed 5 --operations 500"
        in part.failures[0]
    )
    assert "| pools | 4 |" in table({"pools": part}, seed=5)
    with pytest.raises(FuzzFailure):
        broken()


def test_every_kind_of_pool_has_its_turn() -> None:
    names = [name for name, _ in islice(pools(0), len(CONFIGS) + 1)]
    assert names == [*CONFIGS, next(iter(CONFIGS))]
