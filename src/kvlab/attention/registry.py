"""The attention backends by name, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.base import AttentionBackend, AttentionSpec, Support, layout_of
from kvlab.errors import BackendError
from kvlab.kv.storage import PageLayout


class AttentionRegistry:
    """Backends in order of speed, the fastest first."""

    def __init__(self) -> None:
        self._factories: dict[str, Callable[[], AttentionBackend]] = {}
        self._default: str | None = None

    def register(self, name: str, factory: Callable[[], AttentionBackend], *, fastest: bool = False) -> None:
        """Add a backend, behind the others or, with `fastest`, ahead of them.

        Raises BackendError for a name that is taken.
        """
        if name in self._factories:
            raise BackendError(f"attention backend {name!r} is registered already")
        added = {name: factory}
        self._factories = {**added, **self._factories} if fastest else {**self._factories, **added}

    def names(self) -> list[str]:
        """Names of all backends, the fastest first."""
        return list(self._factories)

    def set_default(self, name: str | None) -> None:
        """What `auto` means from now on; None: the first that supports the spec."""
        if name is not None:
            self._make(name)
        self._default = name

    def select(
        self, specs: AttentionSpec | Collection[AttentionSpec], prefer: str | None = None
    ) -> AttentionBackend:
        """The backend `prefer`, or with None or `auto` the fastest that computes every spec of a model's layers.

        Raises BackendError, with the reason, for a named one that cannot compute the specs: a choice is never
        replaced silently.
        """
        specs = [specs] if isinstance(specs, AttentionSpec) else specs
        named = self._default if prefer in (None, "auto") else prefer
        if named is not None:
            backend = self._make(named)
            ok, reason = _supports_all(backend, specs)
            if ok:
                return backend
            raise BackendError(f"attention={named} cannot run here: {reason}")
        reasons, second_best = [], None
        for name in self._factories:
            backend = self._make(name)
            ok, reason = _supports_all(backend, specs)
            if ok and not reason:
                return backend
            if ok:
                second_best = second_best or backend
            reasons.append(f"{name}: {reason}")
        if second_best is not None:
            return second_best
        raise BackendError("no attention backend can run here; " + "; ".join(reasons))

    def _make(self, name: str) -> AttentionBackend:
        if name not in self._factories:
            raise BackendError(f"attention={name}: unknown; known: auto, {', '.join(self._factories)}")
        return self._factories[name]()


def _supports_all(backend: AttentionBackend, specs: Collection[AttentionSpec]) -> Support:
    """The first refusal, else the first reservation, else yes."""
    layout = layout_of(backend)
    if layout not in list(PageLayout):
        return Support(False, f"wants K and V laid out as {layout}; a cache provides {', '.join(PageLayout)}")
    return min((backend.supports(spec) for spec in specs), key=lambda support: (support.ok, not support.reason))


def default_registry(*, kernels: bool = True, prefer: Sequence[str] = ()) -> AttentionRegistry:
    """All registered backends: those in `prefer`, then the others by their `preference`; without `kernels`, those
    that PyTorch computes.
    """
    registry = AttentionRegistry()
    backends = {name: ATTENTION_BACKENDS.get(name) for name in ATTENTION_BACKENDS.names()}
    others = sorted(backends, key=lambda name: -getattr(backends[name], "preference", 0))
    for name in dict.fromkeys([*prefer, *others]):
        if kernels or not getattr(backends[name], "is_kernel", False):
            registry.register(name, backends[name])
    return registry
