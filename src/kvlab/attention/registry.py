"""The choice among the attention backends."""

from collections.abc import Callable, Collection, Mapping, Sequence

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.base import AttentionBackend, AttentionSpec, Support
from kvlab.errors import BackendError, shown
from kvlab.kv.spec import PageLayout

Backends = Mapping[str, Callable[[], AttentionBackend]]


def attention_backends(*, kernels: bool = True, prefer: Sequence[str] = ()) -> Backends:
    """All registered backends by name: those in `prefer`, then the others by their `preference`; without `kernels`,
    those that PyTorch computes.
    """
    known = {name: ATTENTION_BACKENDS.get(name) for name in ATTENTION_BACKENDS.names()}
    ordered = dict.fromkeys([*prefer, *sorted(known, key=lambda name: -known[name].preference)])
    return {name: known[name] for name in ordered if kernels or not known[name].is_kernel}


def select_backend(
    specs: AttentionSpec | Collection[AttentionSpec],
    wanted: str = "auto",
    among: Backends | None = None,
    *,
    assume: str | None = None,
) -> AttentionBackend:
    """The backend `wanted`, or for `auto` the first of `among` (None: all) that computes every spec of a model's
    layers.

    A plan for another machine may `assume` that one backend works, which is then not asked. Raises BackendError,
    with the reason, for a named one that cannot compute the specs: a choice is never replaced silently.
    """
    specs = [specs] if isinstance(specs, AttentionSpec) else specs
    among = attention_backends() if among is None else among
    if wanted not in ("auto", *among):
        raise BackendError(f"attention={wanted}: unknown; known: auto, {', '.join(among)}")
    reasons, second_best = {}, None
    for name in among if wanted == "auto" else [wanted]:
        backend = among[name]()
        if not hasattr(backend, "name"):
            raise BackendError(f"attention={name}: its class has no name; write name = {name!r} there")
        ok, reasons[name] = Support(True) if name == assume else _supports_all(backend, specs)
        if ok and not reasons[name]:
            return backend
        if ok:
            second_best = second_best or backend
    if second_best is not None:
        return second_best
    if wanted != "auto":
        raise BackendError(f"attention={wanted} cannot run here: {reasons[wanted]}")
    every = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise BackendError(f"no attention backend can run here; {every}")


def _supports_all(backend: AttentionBackend, specs: Collection[AttentionSpec]) -> Support:
    """The first refusal, else the first reservation, else yes."""
    layout = backend.layout
    if layout not in list(PageLayout):
        return Support(False, f"wants K and V laid out as {layout}; a cache provides {', '.join(PageLayout)}")
    if any(spec.has_sinks for spec in specs) and not backend.takes_sinks:
        return Support(False, "computes no attention sinks")
    answers = [backend.supports(spec) for spec in specs]
    if wrong := [answer for answer in answers if not isinstance(answer, Support)]:
        return Support(False, f"supports returned {shown(wrong[0], repr)}, no Support")
    return min(answers, key=lambda support: (support.ok, not support.reason))
