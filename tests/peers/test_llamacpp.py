"""llama.cpp as an engine: what it is told, how its batches are made, and its tokens where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvlab.cli.compose import compose_run
from kvlab.errors import ConfigError
from kvlab.lab.results.records import read_run
from kvlab.lab.run.peer_plan import plan_peer
from kvlab.peers.install import installed_python
from kvlab.peers.programs.llamacpp_engine import Batcher, Row, context_options
from tests.support.runs import run_small

SETTINGS: dict[str, Any] = {
    "kv_bytes": 10_000,
    "kv_bytes_per_token": 10,
    "max_seq_len": 300,
    "max_batch_size": 4,
    "max_batched_tokens": 1024,
    "threads": 3,
    "dtype": "bfloat16",
    "options": {"weights": "Q8_0"},
}


def job(name: str, prompt: int, output: int, **others: Any) -> dict[str, Any]:
    return {"id": name, "prompt": [*range(prompt)], "max_tokens": output, "eos": [], "ignore_eos": True} | others


class Decoding:
    """Answers each sampled row with its position, and keeps the batches."""

    def __init__(self) -> None:
        self.batches: list[list[Row]] = []

    def __call__(self, rows: Sequence[Row]) -> list[int]:
        self.batches.append([*rows])
        return [row.position for row in rows if row.is_sampled]


def serve(batcher: Batcher) -> list[list[Any]]:
    events: list[list[Any]] = []
    while batcher.waiting or batcher.running:
        for event in batcher.step():
            events.append(event)
            if event[0] == "end":
                batcher.drop(event[1])
    return events


def test_the_cache_has_the_cells_of_the_pool() -> None:
    shared = context_options(SETTINGS)
    assert (shared["n_ctx"], shared["n_seq_max"], shared["n_batch"], shared["n_ubatch"]) == (1024, 4, 1024, 512)
    assert (shared["n_threads"], shared["type_k"], "weights" in shared) == (3, 30, False)
    assert (shared["flash_attn_type"], context_options(SETTINGS | {"dtype": "float32"})["flash_attn_type"]) == (
        -1,
        0,
    )
    divided = context_options(SETTINGS | {"options": {"kv_unified": False, "n_ubatch": 64}})
    assert (divided["n_ctx"], divided["n_seq_max"], divided["n_ubatch"]) == (512, 1, 64)
    with pytest.raises(ValueError, match=r"kv\.memory holds 1000 tokens, and a sequence of its own takes 1280"):
        context_options(SETTINGS | {"max_seq_len": 1025, "options": {"kv_unified": False}})


def test_tokens_that_follow_come_before_parts_of_prompts() -> None:
    decode = Decoding()
    batcher = Batcher(100, 4, 4, decode)
    batcher.submit(job("a", 2, 3))
    batcher.submit(job("b", 5, 1))
    events = serve(batcher)
    assert [[(row.position, row.slot) for row in batch] for batch in decode.batches] == [
        [(0, 0), (1, 0), (0, 1), (1, 1)],
        [(2, 0), (2, 1), (3, 1), (4, 1)],
        [(3, 0)],
    ]
    assert [event[:3] for event in events] == [
        ["tokens", "a", [1]],
        ["tokens", "a", [2]],
        ["tokens", "b", [4]],
        ["end", "b", "length"],
        ["tokens", "a", [3]],
        ["end", "a", "length"],
    ]
    assert decode.batches[1][0].token == 1  # what was answered before
    assert (batcher.used, sorted(batcher.free)) == (0, [0, 1, 2, 3])


def test_a_request_waits_for_the_cells_of_its_whole_length() -> None:
    decode = Decoding()
    batcher = Batcher(10, 4, 16, decode)
    for name in "abc":
        batcher.submit(job(name, 3, 3))  # 5 cells each
    serve(batcher)
    assert [len(batch) for batch in decode.batches] == [6, 2, 2, 3, 1, 1]
    batcher.submit(job("d", 9, 3))
    batcher.submit(job("e", 3, 1))
    failed, *others = serve(batcher)
    assert (failed[:3], failed[4]) == (
        ["end", "d", "failed"],
        {"error": "kv.memory holds 10 tokens, fewer than the request needs"},
    )
    assert others[-1][:3] == ["end", "e", "length"]


def test_ends_and_aborts() -> None:
    batcher = Batcher(100, 1, 16, Decoding())
    batcher.submit(job("a", 2, 9, eos=[3], ignore_eos=False))
    batcher.submit(job("b", 2, 9, eos=[3]))
    batcher.submit(job("c", 2, 9))
    events = batcher.step()
    assert batcher.drop("c") is None
    events += serve(batcher)
    assert [event[:3] for event in events if event[0] == "end"] == [["end", "a", "stop"], ["end", "b", "length"]]
    batcher.submit(job("d", 2, 9))
    batcher.step()
    assert (batcher.drop("d"), batcher.used, batcher.running) == (0, 0, [])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model=gemma3_tiny"], "model.family=gemma3_text: is not written as GGUF; llama, qwen2, qwen3 are"),
        (["+engine.options.weights=Q4_0"], "engine.options.weights=Q4_0: unknown; known: F32, F16, BF16, Q8_0"),
        (["workload.temperature=1"], "workload.temperature=1.0: engine=llamacpp is greedy alone"),
        (["kv.dtype=int8"], "kv.dtype=int8: engine=llamacpp stores K and V in executor.dtype"),
    ],
)
def test_settings_that_it_does_not_have(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_peer(compose_run(["engine=llamacpp", "model=qwen3_tiny", *settings]).config)
    assert str(raised.value).startswith(said)


@pytest.mark.skipif(installed_python("llamacpp") is None, reason="not installed: kvlab peers install llamacpp")
@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3_tiny", "llama_tiny", "qwen2_tiny"])
@pytest.mark.parametrize("unified", ["true", "false"])
def test_its_tokens_are_those_of_kvlab(tmp_path: Path, model: str, unified: str) -> None:
    lengths = ["workload.output_len={min: 2, max: 9}", "workload.prompt_len={min: 4, max: 30}"]
    shared = [f"model={model}", "executor.dtype=float32", "kv.memory=4MiB", *lengths, "workload.num_requests=7"]
    shared += ["scheduler.max_batched_tokens=16", "scheduler.max_batch_size=4"]
    tokens = []
    for engine in (["engine=kvlab"], ["engine=llamacpp", f"+engine.options.kv_unified={unified}"]):
        folder = tmp_path / engine[0]
        assert run_small(folder, *shared, *engine).status == "finished"
        tokens.append([record.output_token_ids for record in read_run(folder).requests()])
    assert tokens[0] == tokens[1]
    assert not [*tmp_path.rglob("*.gguf")]
