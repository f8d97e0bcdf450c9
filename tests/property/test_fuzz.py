"""The random driver: a short run on every kind of pool, and that it finds what is broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvlab.kv.copy_on_write import CopyOnWrite
from kvlab.kv.prefix import PrefixIndex
from kvlab.kv.sharing import PrefixSharing
from kvlab.kv.storage import KVStorage
from tests.property.fuzz import CONFIGS, FuzzFailure, run


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pool_does_what_its_model_does(name: str) -> None:
    assert run(0, 60, CONFIGS[name]).operations == 60


def test_the_same_seed_makes_the_same_calls() -> None:
    config = CONFIGS["paged2-lru-float32-HND"]
    assert run(7, 80, config) == run(7, 80, config) != run(8, 80, config)


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (CopyOnWrite, "find", lambda *_: []),
        (KVStorage, "copy_blocks", lambda *_: None),
        (PrefixIndex, "prune", lambda *_: None),
        (PrefixSharing, "retract", lambda *_: False),
    ],
    ids=["no copy on write", "copies of nothing", "an index that only grows", "failed steps stay shared"],
)
def test_a_broken_pool_is_found(
    owner: type, method: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, broken)
    with pytest.raises(FuzzFailure, match=r"(?s)seed 1, paged4-lru-int8-NHD, call \d+ of 2000.*--seed 1"):
        run(1, 2000, CONFIGS["paged4-lru-int8-NHD"])
