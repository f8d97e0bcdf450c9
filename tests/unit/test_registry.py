from __future__ import annotations

import pytest
import torch

from kvlab.attention.base import AttentionSpec, Support
from kvlab.attention.registry import AttentionRegistry, default_registry
from kvlab.errors import BackendError
from kvlab.kv.view import CacheView

SPEC = AttentionSpec(4, 2, 16, 0.25, "float32", "cpu")
CAPPED = AttentionSpec(4, 2, 16, 0.25, "float32", "cpu", soft_cap=30.0)


class Backend:
    """Supports every spec but those with a soft cap, if it is told so."""

    def __init__(self, name: str, *, soft_cap: bool = True) -> None:
        self.name = name
        self._soft_cap = soft_cap

    def supports(self, spec: AttentionSpec) -> Support:
        if spec.soft_cap is not None and not self._soft_cap:
            return Support(False, f"{self.name} has no soft cap")
        return Support(True)

    def forward(self, q: torch.Tensor, view: CacheView, layer: int, spec: AttentionSpec) -> torch.Tensor:
        raise NotImplementedError


@pytest.fixture
def registry() -> AttentionRegistry:
    registry = AttentionRegistry()
    registry.register("fast", lambda: Backend("fast", soft_cap=False))
    registry.register("slow", lambda: Backend("slow"))
    return registry


def test_names_are_in_order_of_speed(registry: AttentionRegistry) -> None:
    registry.register("slowest", lambda: Backend("slowest"))
    registry.register("fastest", lambda: Backend("fastest"), fastest=True)
    assert registry.names() == ["fastest", "fast", "slow", "slowest"]


@pytest.mark.parametrize("prefer", [None, "auto"])
def test_auto_takes_the_fastest_that_supports_the_spec(registry: AttentionRegistry, prefer: str | None) -> None:
    assert registry.select(SPEC, prefer).name == "fast"
    assert registry.select(CAPPED, prefer).name == "slow"


def test_a_named_one_is_taken_as_it_is_named(registry: AttentionRegistry) -> None:
    assert registry.select(SPEC, "slow").name == "slow"


def test_a_named_one_that_cannot_is_refused_with_its_reason(registry: AttentionRegistry) -> None:
    with pytest.raises(BackendError, match="attention=fast cannot run here: fast has no soft cap"):
        registry.select(CAPPED, "fast")


def test_an_unknown_one_lists_the_known(registry: AttentionRegistry) -> None:
    with pytest.raises(BackendError, match="attention=flash: unknown; known: auto, fast, slow"):
        registry.select(SPEC, "flash")


@pytest.mark.parametrize("prefer", [None, "auto"])
def test_a_default_is_what_auto_means(registry: AttentionRegistry, prefer: str | None) -> None:
    registry.set_default("slow")
    assert registry.select(SPEC, prefer).name == "slow"
    assert registry.select(SPEC, "fast").name == "fast"
    registry.set_default(None)
    assert registry.select(SPEC, prefer).name == "fast"


def test_a_default_is_never_replaced_silently(registry: AttentionRegistry) -> None:
    registry.set_default("fast")
    with pytest.raises(BackendError, match="fast has no soft cap"):
        registry.select(CAPPED)


def test_an_unknown_default_is_refused_and_changes_nothing(registry: AttentionRegistry) -> None:
    registry.set_default("slow")
    with pytest.raises(BackendError, match="attention=flash: unknown"):
        registry.set_default("flash")
    assert registry.select(SPEC).name == "slow"


def test_with_none_that_can_every_reason_is_given() -> None:
    registry = AttentionRegistry()
    registry.register("one", lambda: Backend("one", soft_cap=False))
    registry.register("two", lambda: Backend("two", soft_cap=False))
    with pytest.raises(BackendError, match="one: one has no soft cap; two: two has no soft cap"):
        registry.select(CAPPED)


def test_a_name_is_registered_once(registry: AttentionRegistry) -> None:
    with pytest.raises(BackendError, match="'fast' is registered already"):
        registry.register("fast", lambda: Backend("other"))
    assert registry.names() == ["fast", "slow"]


def test_registries_share_nothing() -> None:
    first, second = default_registry(), default_registry()
    first.register("mine", lambda: Backend("mine"), fastest=True)
    first.set_default("mine")
    assert "mine" not in second.names()
    assert second.select(SPEC).name != "mine"


def test_every_backend_of_kvlab_has_the_name_it_is_registered_by() -> None:
    registry = default_registry()
    assert {"concat", "safe_softmax", "online_softmax", "sdpa"} <= set(registry.names())
    for name in ("concat", "safe_softmax", "online_softmax", "sdpa"):
        assert registry.select(SPEC, name).name == name


def test_every_layer_of_a_model_counts(registry: AttentionRegistry) -> None:
    assert registry.select([SPEC, CAPPED]).name == "slow"
    with pytest.raises(BackendError, match="attention=fast cannot run here"):
        registry.select([SPEC, CAPPED], "fast")


class Reluctant(Backend):
    def supports(self, spec: AttentionSpec) -> Support:
        return Support(True, "for tests, not for speed")


def test_a_reservation_makes_auto_look_further(registry: AttentionRegistry) -> None:
    registry.register("reluctant", lambda: Reluctant("reluctant"), fastest=True)
    assert registry.select(SPEC).name == "fast"
    assert registry.select(SPEC, "reluctant").name == "reluctant"


def test_a_reservation_is_better_than_nothing() -> None:
    registry = AttentionRegistry()
    registry.register("reluctant", lambda: Reluctant("reluctant"))
    assert registry.select(SPEC).name == "reluctant"


def test_preferred_backends_come_first_and_kernels_can_be_left_out() -> None:
    assert default_registry(prefer=["concat"]).select(SPEC).name == "concat"
    names = default_registry(kernels=False, prefer=["cpu"]).names()
    assert names[0] == "sdpa"
    assert not {"cpu", "triton"} & set(names)


def test_by_default_kernels_are_tried_first() -> None:
    assert default_registry().names()[:3] == ["cpu", "triton", "sdpa"]
