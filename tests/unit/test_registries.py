"""Registries: names without imports, one implementation per name, errors that say what there is."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvlab.contract import misfit
from kvlab.errors import ConfigError
from kvlab.fleet.base import Router
from kvlab.registry import _CONTRACTS, KEYS, Registry, _found, registry
from kvlab.simulation.timings import Timing


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


class _Unfinished(Router):
    pass


class _Short(Router):
    def choose(self, request: Any, replicas: Any) -> Any:  # type: ignore[override]
        pass


class _Narrow(Router):
    def __init__(self, config: Any) -> None:
        super().__init__(config)

    def choose(self, request: Any, replicas: Any, now: float) -> Any:
        pass


class _Settled(_Unfinished):
    choose = None  # type: ignore[assignment]


class _Computed(Router):
    @property
    def choose(self) -> Any:
        return _eager


class _Asked(Timing):
    def __init__(self, any_number: int, of_arguments: int) -> None:
        """`of` makes it, as it likes."""

    def of(self, deployment: Any) -> Any:  # type: ignore[override]
        pass

    description = "mine"


def _eager(running: Any, state: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("key", "implementation", "said"),
    [
        ("fleet.router", _eager, "_eager has to be a subclass of kvlab.fleet.base.Router"),
        ("fleet.router", _Unfinished, "_Unfinished lacks choose of Router"),
        ("fleet.router", _Settled, "_Settled.choose has to be a method of (self, request, replicas, now)"),
        (
            "fleet.router",
            _Short,
            "_Short.choose(self, request, replicas) is called with (self, request, replicas, now)",
        ),
        ("fleet.router", _Narrow, "_Narrow.__init__(self, config) is called with (self, config, seed=0)"),
        ("kv.eviction", _Short, "_Short has to be a subclass of kvlab.kv.eviction.base.EvictionPolicy"),
        ("scheduler.preemption.victim", _eager, "_eager(running, state) is called with (running)"),
        ("scheduler.preemption.victim", "last", "'last' has to be a function of (running)"),
        ("executor.timing", _Asked, "_Asked.of(self, deployment) is called with (deployment)"),
        ("executor.timing", _eager, "_eager has to be a subclass of kvlab.simulation.timings.base.Timing"),
        ("workload.source", _eager, "_eager(running, state) is called with (config, *, vocab_size, seed)"),
    ],
)
def test_what_kvlab_could_not_call_is_refused_at_once(key: str, implementation: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry(key).register("mine")(implementation)
    assert str(caught.value) == f"{key}=mine: {said}"
    assert "mine" not in registry(key).names()


def test_what_becomes_a_method_when_it_is_looked_up_is_taken() -> None:
    assert misfit(_Computed, Router) is None


def test_kvlabs_own_implementations_keep_their_contracts() -> None:
    for key in _CONTRACTS:
        if key in KEYS:
            known = registry(key)
            own = known.own_names() - {"auto"}  # a timing that chooses another one, and is none itself
            assert {name: misfit(known.get(name), _found(_CONTRACTS[key])) for name in own} == dict.fromkeys(own)
