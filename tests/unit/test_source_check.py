"""Sources of a plugin that make no requests a run could drive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.config import WorkloadConfig
from kvlab.core import Request, SamplingParams
from kvlab.errors import WorkloadError
from kvlab.workloads import build_requests
from kvlab.workloads.sources import WORKLOAD_SOURCES


def asked(name: Any, arrival_s: float = 0.0, *, prompt: Any = (1, 2), follows: str | None = None) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=4), arrival_s, follows=follows)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, "has to return requests, not None"),
        ([], "has no request"),
        ([asked("a"), "b"], "request 2 is 'b', no kvlab.core.Request"),
        ([asked("a"), asked("a")], "two requests have request_id='a'"),
        ([asked(7)], "request_id=7: must be a string"),
        ([asked("a", float("nan"))], "request a: arrival_s=nan: must be seconds, 0 or more"),
        ([asked("a", -1.0)], "request a: arrival_s=-1.0: must be seconds, 0 or more"),
        ([asked("a", float("inf"))], "request a: arrival_s=inf: must be seconds, 0 or more"),
        (
            [asked("a", prompt=np.arange(3))],
            "request a: prompt_token_ids=array([0, 1, 2]): must be a tuple of token",
        ),
        ([asked("a", follows="b"), asked("b")], "request a follows 'b', which is none before it"),
        (
            [asked("a"), asked("b", follows="a"), asked("c", follows="a")],
            "request c follows 'a', as another one does already",
        ),
    ],
)
def test_it_is_named_with_the_request(made: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOAD_SOURCES._entries, "mine", lambda config, *, vocab_size, seed: made)
    with pytest.raises(WorkloadError) as caught:
        build_requests(WorkloadConfig(source="mine"), vocab_size=100, seed=0)
    assert str(caught.value).startswith(f"workload.source=mine: {said}")
