"""The attention backends by name, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable

from kvlab.attention.base import AttentionBackend, AttentionSpec
from kvlab.attention.concat import ConcatAttention
from kvlab.attention.sdpa import SdpaAttention
from kvlab.errors import BackendError


class AttentionRegistry:
    """Backends in order of speed, the fastest first."""

    def __init__(self) -> None:
        self._factories: dict[str, Callable[[], AttentionBackend]] = {}
        self._default: str | None = None

    def register(self, name: str, factory: Callable[[], AttentionBackend], *, fastest: bool = False) -> None:
        """Add a backend, behind those there are or, with `fastest`, ahead of them.

        Raises BackendError for a name that is taken.
        """
        if name in self._factories:
            raise BackendError(f"attention backend {name!r} is registered already")
        if fastest:
            self._factories = {name: factory, **self._factories}
        else:
            self._factories[name] = factory

    def names(self) -> list[str]:
        """Names of all backends, the fastest first."""
        return list(self._factories)

    def set_default(self, name: str | None) -> None:
        """What `auto` means from now on; None: the first that supports the spec."""
        if name is not None:
            self._known(name)
        self._default = name

    def select(self, spec: AttentionSpec, prefer: str | None = None) -> AttentionBackend:
        """The backend `prefer`, or with None or `auto` the first that supports the spec.

        Raises BackendError, with the reason, for a named one that cannot compute the spec: a choice is never
        replaced silently.
        """
        name = self._default if prefer in (None, "auto") else prefer
        if name is not None:
            self._known(name)
            backend = self._factories[name]()
            support = backend.supports(spec)
            if not support.ok:
                raise BackendError(f"attention={name} cannot run here: {support.reason}")
            return backend
        reasons = []
        for known, factory in self._factories.items():
            backend = factory()
            support = backend.supports(spec)
            if support.ok:
                return backend
            reasons.append(f"{known}: {support.reason}")
        raise BackendError("no attention backend can run here; " + "; ".join(reasons))

    def _known(self, name: str) -> None:
        if name not in self._factories:
            raise BackendError(f"attention={name}: unknown; known: auto, {', '.join(self._factories)}")


def default_registry() -> AttentionRegistry:
    """A registry of kvlab's own backends."""
    registry = AttentionRegistry()
    registry.register(SdpaAttention.name, SdpaAttention)
    registry.register(ConcatAttention.name, ConcatAttention)
    return registry
