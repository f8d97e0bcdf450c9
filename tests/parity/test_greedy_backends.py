"""Every backend, contiguous and paged, gives a family's tiny model the same greedy tokens on burst16 (float32).

Each backend runs each family in one of the two caches, two families in each, on shorter prompts and answers.
KVLAB_WHOLE_BURST=1 runs all.
"""

from __future__ import annotations

import itertools
import os
from functools import cache

import pytest

from kvlab.attention.registry import attention_backends
from kvlab.cli.compose import compose_run
from kvlab.engine.build import build_engine
from kvlab.errors import BackendError
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import plan_run

CACHES = ("contiguous", "paged")
FAMILIES = ("llama_tiny", "qwen2_tiny", "qwen3_tiny", "gemma3_tiny")
# The readable backends and the interpreted kernels are slow: they get the fewest tokens.
_WHOLE = bool(os.environ.get("KVLAB_WHOLE_BURST"))
_SLOW = ("triton", "safe_softmax", "online_softmax")
_SHORT = ("workload.num_requests=8", "workload.prompt_len.min=12", "workload.prompt_len.max=36",
          "workload.output_len.min=3", "workload.output_len.max=4")  # fmt: skip
_MEDIUM = ("workload.prompt_len.min=40", "workload.prompt_len.max=160", "workload.output_len.min=20",
           "workload.output_len.max=36")  # fmt: skip


@cache
def greedy_tokens(model: str, kv: str, backend: str, *, short: bool) -> list[list[int]]:
    overrides = [f"model={model}", f"kv={kv}", f"attention={backend}", "workload=burst16", "executor.dtype=float32"]
    try:
        plan = plan_run(compose_run([*overrides, *(() if _WHOLE else _SHORT if short else _MEDIUM)]).config)
    except BackendError as error:
        pytest.skip(str(error))
    log = drive(build_engine(plan), plan.requests)
    return [list(record.output_token_ids) for record in log.records]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kv", "backend"),
    [
        (model, kv, backend)
        for number, (model, backend) in enumerate(itertools.product(FAMILIES, attention_backends()))
        for place, kv in enumerate(CACHES)
        if _WHOLE or (number + number // len(attention_backends())) % 2 == place
    ],
)
def test_burst16(model: str, kv: str, backend: str) -> None:
    short = backend in _SLOW and not _WHOLE
    expected = greedy_tokens(model, "paged", "concat", short=short)
    assert len(expected) == (8 if short else 16)
    assert len({tuple(tokens) for tokens in expected}) == len(expected)  # the model does listen to its prompt
    assert greedy_tokens(model, kv, backend, short=short) == expected
