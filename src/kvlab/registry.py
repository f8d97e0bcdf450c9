"""Implementations by name: one registry for each axis that a user can extend.

    @ORDERS.register("longest_prefix")
    class LongestPrefix(Order): ...

Settings name an implementation, and are checked long before it is used; so this module knows for each setting where
its registry is, and imports that module when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Generic, TypeVar

from kvlab.errors import ConfigError

T = TypeVar("T")

#: The module and the name of the registry behind each setting.
_HOMES = {
    "kv.backend": "kvlab.kv.pools:POOLS",
    "kv.eviction": "kvlab.kv.eviction:EVICTION_POLICIES",
    "scheduler.policy": "kvlab.engine.scheduler.base:POLICIES",
    "scheduler.order": "kvlab.engine.scheduler.orders.base:ORDERS",
    "scheduler.preemption.victim": "kvlab.engine.scheduler.victims:VICTIMS",
    "attention.backend": "kvlab.attention.base:ATTENTION_BACKENDS",
    "workload.source": "kvlab.workloads.base:WORKLOAD_SOURCES",
}


class Registry(Generic[T]):
    """What can be chosen for one setting. `builtins` is the module or package that registers kvlab's own; of a
    package every module is imported, so that a new file in it is enough.
    """

    def __init__(self, key: str, builtins: str) -> None:
        self.key = key
        self._builtins: str | None = builtins
        self._entries: dict[str, T] = {}

    def register(self, name: str, *, first: bool = False) -> Callable[[T], T]:
        """Decorate an implementation to make it known as `name`; `first` puts it ahead of all others.

        Raises ConfigError for a name that is taken.
        """

        def add(implementation: T) -> T:
            if name in self._entries and self._entries[name] is not implementation:
                raise ConfigError(self.key, name, f"is registered already, as {self._entries[name]!r}")
            self._entries = (
                {name: implementation, **self._entries} if first else {**self._entries, name: implementation}
            )
            return implementation

        return add

    def names(self) -> tuple[str, ...]:
        """What can be chosen, in order of registration."""
        self._load()
        return tuple(self._entries)

    def get(self, name: str) -> T:
        """The implementation of that name. Raises ConfigError, with the known names, where there is none."""
        self._load()
        if name not in self._entries:
            close = get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(self.key, name, f"unknown; known: {', '.join(self._entries)}{hint}")
        return self._entries[name]

    def _load(self) -> None:
        if self._builtins is None:
            return
        module, self._builtins = import_module(self._builtins), None
        for found in iter_modules(getattr(module, "__path__", ())):
            import_module(f"{module.__name__}.{found.name}")


def registry(key: str) -> Registry[Any]:
    """The registry behind a setting such as `scheduler.order`."""
    module, _, name = _HOMES[key].partition(":")
    found: Registry[Any] = getattr(import_module(module), name)
    return found
