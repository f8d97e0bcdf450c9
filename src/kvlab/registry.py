"""Implementations by name: one registry for each axis that a user can extend.

    @ORDERS.register("longest_prefix")
    class LongestPrefix(Order): ...

The configuration checks a name long before the implementation is used. So that a check imports neither torch nor an
implementation, a registry knows what is in its package by the names of the package's modules.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Generic, TypeVar

from kvlab.contract import misfit
from kvlab.errors import ConfigError, nearest

T = TypeVar("T")

#: Behind each setting the registry; and what a plugin's implementation has to be: a subclass of this class, or a
#: function like this one. As module and name, both in `kvlab`.
_KINDS: dict[str, tuple[str, str]] = {
    "kv.backend": ("kv.pools:POOLS", ""),
    "kv.eviction": ("kv.eviction:EVICTION_POLICIES", "kv.eviction:EvictionPolicy"),
    "scheduler.policy": ("engine.scheduler:POLICIES", "engine.scheduler:Scheduler"),
    "scheduler.order": ("engine.scheduler.orders:ORDERS", "engine.scheduler.orders:Order"),
    "scheduler.preemption.victim": ("engine.scheduler.victims:VICTIMS", "engine.scheduler.victims:last_admitted"),
    "scheduler.speculation.method": ("engine.speculation:PROPOSERS", "engine.speculation:Proposer"),
    "attention.backend": ("attention.backends:ATTENTION_BACKENDS", "attention.base:AttentionBackend"),
    "engine.kind": ("peers.engines:ENGINES", "peers.engines:EngineKind"),
    "executor.kind": ("engine.executors:EXECUTORS", "engine.executors:ExecutorKind"),
    "executor.timing": ("simulation.timings:TIMINGS", "simulation.timings:Timing"),
    "fleet.router": ("fleet.routers:ROUTERS", "fleet.routers:Router"),
    "workload.source": ("workloads.sources:WORKLOAD_SOURCES", "workloads.sources.synthetic:synthesize"),
    "format": ("", "workloads.importers:Importer"),  # of an import, which is no setting of a run
}

#: Every setting that takes a name from a registry.
KEYS = tuple(key for key, (home, _) in _KINDS.items() if home)
_CONTRACTS = {key: contract for key, (_, contract) in _KINDS.items() if contract}


class Registry(Generic[T]):
    """What can be chosen for one setting.

    With a `package`, each of its modules (except `base`) registers one implementation, under the module's own name,
    and is imported when that name is asked for: a new file in the package is enough. Without one, the module that
    holds the registry registers kvlab's implementations itself.
    """

    def __init__(self, key: str, package: str | None = None) -> None:
        self.key = key
        self._package = package
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorate an implementation to make it known as `name`. Raises ConfigError for a name that is taken, and
        for an implementation outside of kvlab that cannot be called as kvlab would call it.
        """

        def add(implementation: T) -> T:
            owner = self._owner(name)
            if owner not in (None, _where(implementation), getattr(implementation, "__module__", None)):
                raise ConfigError(self.key, name, f"is registered already, by {owner}; choose another name")
            contract = None if _where(implementation).startswith("kvlab.") else _CONTRACTS.get(self.key)
            if contract is not None and (text := misfit(implementation, _found(contract))):
                raise ConfigError(self.key, name, text)
            self._entries[name] = implementation
            return implementation

        return add

    def names(self) -> tuple[str, ...]:
        """What can be chosen, sorted."""
        return tuple(sorted({*self._entries, *self._modules()}))

    def own_names(self) -> set[str]:
        """Of those, the names of kvlab's own implementations."""
        return {name for name in self.names() if str(self._owner(name)).startswith("kvlab.")}

    def get(self, name: str) -> T:
        """The implementation of that name. Raises ConfigError, with the known names, where there is none."""
        self.check(name)
        if name not in self._entries:
            import_module(f"{self._package}.{name}")
        return self._entries[name]

    def check(self, name: str, *, key: str | None = None) -> None:
        """Raise ConfigError for `key`, with the known names, unless something has this name. Imports no
        implementation.
        """
        names = self.names()
        if name not in names:
            hint = nearest(name, names, "did you mean {}?") or "a name of your own needs plugins=[<module>]"
            raise ConfigError(key or self.key, name, f"unknown; known: {', '.join(names)}; {hint}")

    def _owner(self, name: str) -> str | None:
        """Who has a name: what is registered, or one of kvlab's modules that is not imported yet."""
        if name in self._entries:
            return _where(self._entries[name])
        return f"{self._package}.{name}" if name in self._modules() else None

    def _modules(self) -> frozenset[str]:
        return frozenset() if self._package is None else _modules_of(self._package)


@cache  # a run checks each of its names, some of them several times
def _modules_of(package: str) -> frozenset[str]:
    return frozenset(found.name for found in iter_modules(import_module(package).__path__)) - {"base"}


def _where(implementation: object) -> str:
    """The module and the name of a class or function: the same when its module is imported again."""
    return f"{getattr(implementation, '__module__', '')}.{getattr(implementation, '__qualname__', implementation)}"


def registry(key: str) -> Registry[Any]:
    """The registry behind a setting such as `scheduler.order`."""
    found: Registry[Any] = _found(_KINDS[key][0])
    return found


def _found(where: str) -> Any:
    """What `module:name` names."""
    module, _, name = where.partition(":")
    return getattr(import_module(f"kvlab.{module}"), name)
