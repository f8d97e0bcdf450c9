"""Engines of a tiny model whose blocks go to a directory."""

from __future__ import annotations

from pathlib import Path

from kvlab.core import Request, RequestRecord, SamplingParams
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.core import EngineCore
from tests.support.plans import composed

PROMPTS = [tuple(range(start, start + 100)) for start in (0, 100, 200)]


def engine_for(directory: Path, *overrides: str) -> EngineCore:
    """Its pool has room for one of the prompts."""
    given = {text.partition("=")[0] for text in overrides}
    settings = [
        "model=qwen3_tiny",
        "workload=burst16",
        "executor.dtype=float32",
        "executor.threads=1",
        "kv.num_blocks=8",
        "kv.offload_disk=16MiB",
        f"kv.offload_dir={directory}",
    ]
    return build_engine(
        plan_engine(composed(*(t for t in settings if t.partition("=")[0] not in given), *overrides))
    )


def outputs(engine: EngineCore, *, close: bool = True) -> tuple[list[tuple[int, ...]], list[int]]:
    """What each prompt is answered with, and how many of its tokens were found."""
    records: list[RequestRecord] = []
    for number, prompt in enumerate(PROMPTS):
        engine.submit(
            Request(f"request {number}", prompt, SamplingParams(4, ignore_eos=True)), None, records.append
        )
        while engine.has_work():
            engine.step()
            assert engine.audit() == []
    if close:
        engine.close()
    return [record.output_token_ids for record in records], [record.cached_tokens for record in records]
