from __future__ import annotations

from functools import partial

import pytest
import torch

from kvlab.attention.base import AttentionBackend, AttentionSpec, Support, check_attended
from kvlab.attention.registry import Backends, attention_backends, select_backend
from kvlab.errors import BackendError
from kvlab.kv.view import CacheView

SPEC = AttentionSpec(4, 2, 16, 0.25, "float32", "cpu")
CAPPED = AttentionSpec(4, 2, 16, 0.25, "float32", "cpu", soft_cap=30.0)


class Backend(AttentionBackend):
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


BOTH: Backends = {"fast": partial(Backend, "fast", soft_cap=False), "slow": partial(Backend, "slow")}


def test_auto_takes_the_fastest_that_supports_the_spec() -> None:
    assert select_backend(SPEC, among=BOTH).name == "fast"
    assert select_backend(CAPPED, "auto", BOTH).name == "slow"


def test_a_named_one_is_taken_as_it_is_named() -> None:
    assert select_backend(SPEC, "slow", BOTH).name == "slow"


def test_a_named_one_that_cannot_is_refused_with_its_reason() -> None:
    with pytest.raises(BackendError, match="attention=fast cannot run here: fast has no soft cap"):
        select_backend(CAPPED, "fast", BOTH)


def test_an_unknown_one_lists_the_known() -> None:
    with pytest.raises(BackendError, match="attention=flash: unknown; known: auto, fast, slow"):
        select_backend(SPEC, "flash", BOTH)


def test_with_none_that_can_every_reason_is_given() -> None:
    among = {name: partial(Backend, name, soft_cap=False) for name in ("one", "two")}
    with pytest.raises(BackendError, match="one: one has no soft cap; two: two has no soft cap"):
        select_backend(CAPPED, among=among)


def test_every_backend_of_kvlab_has_the_name_it_is_registered_by() -> None:
    for name in ("concat", "safe_softmax", "online_softmax", "sdpa"):
        assert select_backend(SPEC, name).name == name


def test_every_layer_of_a_model_counts() -> None:
    assert select_backend([SPEC, CAPPED], among=BOTH).name == "slow"
    with pytest.raises(BackendError, match="attention=fast cannot run here"):
        select_backend([SPEC, CAPPED], "fast", BOTH)


class Reluctant(Backend):
    def supports(self, spec: AttentionSpec) -> Support:
        return Support(True, "for tests, not for speed")


def test_a_reservation_makes_auto_look_further() -> None:
    among: Backends = {"reluctant": partial(Reluctant, "reluctant"), **BOTH}
    assert select_backend(SPEC, among=among).name == "fast"
    assert select_backend(SPEC, "reluctant", among).name == "reluctant"


def test_a_reservation_is_better_than_nothing() -> None:
    assert select_backend(SPEC, among={"reluctant": partial(Reluctant, "reluctant")}).name == "reluctant"


def test_preferred_backends_come_first_and_kernels_can_be_left_out() -> None:
    assert select_backend(SPEC, among=attention_backends(prefer=["concat"])).name == "concat"
    names = list(attention_backends(kernels=False, prefer=["cpu"]))
    assert names[0] == "sdpa"
    assert not {"cpu", "triton"} & set(names)


def test_by_default_kernels_are_tried_first() -> None:
    assert list(attention_backends())[:3] == ["cpu", "triton", "sdpa"]


class _Yes(Backend):
    def supports(self, spec: AttentionSpec) -> Support:
        return True  # type: ignore[return-value]


def test_one_that_answers_no_support_is_refused() -> None:
    with pytest.raises(BackendError, match="attention=yes cannot run here: supports returned True, no Support"):
        select_backend(SPEC, "yes", {"yes": partial(_Yes, "yes")})


def test_one_without_a_name_is_told_to_have_one() -> None:
    class Nameless(Backend):
        def __init__(self) -> None:
            pass

    with pytest.raises(BackendError, match="attention=slow: its class has no name; write name = 'slow' there"):
        select_backend(SPEC, "slow", {"slow": Nameless})


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "NoneType"),
        (torch.zeros(3, 1, 16), r"\[3, 1, 16\] in torch.float32"),
        (torch.zeros(3, 4, 16, dtype=torch.float64), r"\[3, 4, 16\] in torch.float64"),
    ],
)
def test_what_forward_returns_is_shaped_as_the_queries(returned: torch.Tensor | None, said: str) -> None:
    q = torch.zeros(3, 4, 16)
    check_attended(Backend("slow"), q, q)
    with pytest.raises(
        BackendError, match=rf"attention=slow returned {said}; forward returns \[3, 4, 16\] in torch"
    ):
        check_attended(Backend("slow"), returned, q)
