"""Registries: names without imports, one implementation per name, errors that say what there is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvlab.errors import ConfigError
from kvlab.registry import KEYS, Registry, registry


@pytest.mark.parametrize("key", KEYS)
def test_every_name_has_an_implementation(key: str) -> None:
    known = registry(key)
    assert known.key == key
    assert known.names()
    assert all(callable(known.get(name)) for name in known.names())


@pytest.mark.parametrize("key", KEYS)
def test_an_unknown_name_lists_the_known_and_says_how_to_add_one(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry(key).get("nonsense")
    known = ", ".join(registry(key).names())
    advice = "a name of your own needs plugins=[<module>]"
    assert str(caught.value) == f"{key}=nonsense: unknown; known: {known}; {advice}"


def test_a_slip_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean shortest_first"):
        registry("scheduler.order").check("shortest_frist")


def test_names_are_checked_without_torch() -> None:
    code = (
        "import sys; from kvlab.config import RunConfig; from kvlab.registry import KEYS, registry;"
        "RunConfig(); print([registry(key).names() for key in KEYS]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_a_name_is_registered_once() -> None:
    letters: Registry[type] = Registry("letters")
    letters.register("a")(int)
    letters.register("a")(int)  # the same again: a module that is imported twice
    with pytest.raises(ConfigError, match="letters=a: is registered already"):
        letters.register("a")(str)
    assert letters.names() == ("a",)
    assert letters.get("a") is int


def test_a_name_of_kvlab_that_is_not_imported_yet_is_taken_too() -> None:
    with pytest.raises(ConfigError, match=r"kv\.backend=paged: is registered already"):
        registry("kv.backend").register("paged")(int)
