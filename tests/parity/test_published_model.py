"""The published model gives transformers' greedy tokens in float32, whatever computes them, wherever K and V are.

All of 5 backends x 3 caches x preempted or not, 32 prompts x 64 tokens each, take 20 minutes of a core, and are run
by KVLAB_PARITY=all. Otherwise each backend has one of the caches, preempted or not, with 20 tokens of 4 prompts;
the backend that a CPU takes also has 24 tokens of all of them, shared and preempted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvlab.errors import BackendError
from kvlab.models.gguf import GgufFile
from tests.parity.published import PROMPTS, TOKENS, expected, margin, reference, served
from tests.support.published import smollm2_file

ALL = os.environ.get("KVLAB_PARITY") == "all"
BACKENDS = ("cpu", "sdpa", "concat", "online_softmax", "safe_softmax")
CACHES = ("contiguous", "paged_unshared", "paged")
BLOCK = 16
#: A slot is never preempted.
PAIRS = [(backend, kv, preempt) for backend in BACKENDS for kv in CACHES for preempt in (False, True)
         if not (preempt and kv == "contiguous")]  # fmt: skip
FEW = [
    ("cpu", "contiguous", False),
    ("sdpa", "paged", True),
    ("concat", "paged_unshared", True),
    ("online_softmax", "paged", False),
    ("safe_softmax", "contiguous", False),
]


def shared_tokens(prompts: list[list[int]]) -> int:
    """How many tokens all prompts begin with."""
    return next(place for place, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)


def check(backend: str, kv: str, preempt: bool, count: int, tokens: int) -> None:
    smollm2_file()
    rows = expected()[:count]
    prompts = [row.prompt for row in rows]
    needed = sum(-(-len(prompt) // BLOCK) for prompt in prompts)
    if kv == "paged":
        needed -= shared_tokens(prompts) // BLOCK * (count - 1)
    # All prompts fit, and their answers do not.
    blocks = needed + (1 if preempt else count * -(-tokens // BLOCK))
    overrides = [f"attention={backend}", f"kv={kv}", f"scheduler.max_batch_size={count}"]
    if kv != "contiguous":
        overrides += [f"kv.num_blocks={blocks}", f"kv.block_size={BLOCK}", "scheduler.admission_reserve=0"]
    try:
        found, stats = served(prompts, *overrides, tokens=tokens)
    except BackendError as error:
        pytest.skip(str(error))
    assert found == [row.tokens[:tokens] for row in rows]
    assert bool(stats.preemptions) == preempt
    assert bool(stats.hit_tokens) == (kv == "paged")


@pytest.fixture(scope="module", autouse=True)
def dequantised_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GgufFile, "read", cached_by_name(GgufFile.read))
        yield


def cached_by_name(read: Callable[[GgufFile, str], NDArray[np.float32]]) -> Callable[[GgufFile, str], Any]:
    kept: dict[str, NDArray[np.float32]] = {}

    def cached(file: GgufFile, name: str) -> NDArray[np.float32]:
        if name not in kept:
            kept[name] = read(file, name)
        return kept[name]

    return cached


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "kv", "preempt"), PAIRS if ALL else FEW)
def test_greedy_tokens_are_those_of_transformers(backend: str, kv: str, preempt: bool) -> None:
    check(backend, kv, preempt, *((PROMPTS, TOKENS) if ALL else (4, 20)))


@pytest.mark.slow
def test_all_prompts_shared_and_preempted() -> None:
    check("cpu", "paged", True, PROMPTS, TOKENS if ALL else 24)


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
