"""Asking for attention backends by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pytest_bdd import parsers, then, when

from kvlab.attention.base import AttentionSpec
from kvlab.attention.registry import select_backend
from kvlab.errors import BackendError

_SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, dtype="float32", device="cpu")


@when(parsers.parse('I ask for the backend "{name}" with a soft cap of {cap:d}'), target_fixture="answer")
def ask(name: str, cap: int) -> str | BackendError:
    """The name of the backend that was given, or the refusal."""
    try:
        return select_backend(replace(_SPEC, soft_cap=float(cap)), name).name
    except BackendError as refusal:
        return refusal


@then(parsers.parse('I am refused with "{name}" and "{reason}"'))
def backend_refused(answer: str | BackendError, name: str, reason: str) -> None:
    assert isinstance(answer, BackendError)
    assert name in str(answer)
    assert reason in str(answer)


@then(parsers.parse('I am given a backend that computes it, not "{name}"'))
def given_another(answer: str | BackendError, name: str) -> None:
    if isinstance(answer, BackendError):
        pytest.fail(str(answer))
    assert answer != name
    assert select_backend(replace(_SPEC, soft_cap=30.0), answer).name == answer
