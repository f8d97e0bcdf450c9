"""The published model gives transformers' greedy tokens in float32, whatever computes them, wherever K and V are.

All of 5 backends x 3 caches x preempted or not, 32 prompts x 64 tokens each, take 20 minutes of a core, and are run
by KVLAB_PARITY=all. features/text.feature has 12 tokens of 3 prompts on each backend; here the backend that a CPU
takes has 16 tokens of all prompts, shared and preempted.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.parity.published import PROMPTS, TOKENS, check_served, expected, margin, reference
from tests.support.published import smollm2_file

ALL = os.environ.get("KVLAB_PARITY") == "all"
BACKENDS = ("cpu", "sdpa", "concat", "online_softmax", "safe_softmax")
CACHES = ("contiguous", "paged_unshared", "paged")
#: A slot is never preempted.
PAIRS = [(backend, kv, preempt) for backend in BACKENDS for kv in CACHES for preempt in (False, True)
         if not (preempt and kv == "contiguous")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "kv", "preempt"), PAIRS if ALL else [("cpu", "paged", True)])
def test_all_prompts(backend: str, kv: str, preempt: bool) -> None:
    check_served(backend, kv, preempt, PROMPTS, TOKENS if ALL else 16)


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="KVLAB_PARITY=all compares what is kept with transformers anew")
def test_the_tokens_that_are_kept_are_transformers_own() -> None:
    model = reference(smollm2_file())
    with torch.no_grad():
        assert min(margin(model, row.prompt, row.tokens) for row in expected()) > 1e-3


def test_what_is_kept_is_32_prompts_of_64_tokens() -> None:
    rows = expected()
    assert [len(row.tokens) for row in rows] == [TOKENS] * PROMPTS
    assert len({tuple(row.tokens) for row in rows}) == PROMPTS
