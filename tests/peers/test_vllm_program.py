"""What the program that runs vLLM does before vLLM is there."""

from __future__ import annotations

import io
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvlab.peers.programs import vllm_engine

ARCHITECTURE = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def shapes(**values: int) -> dict[str, Any]:
    return {"weights": None, "path": None, "family": "llama", "architecture": ARCHITECTURE | values}


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_that_there_is_no_vllm_is_said_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'vllm'") as raised:
        vllm_engine.Vllm({"kv_bytes": 1})
    assert raised.value.name == "vllm"


def test_an_architecture_has_one_place_for_all_runs(tmp_path: Path) -> None:
    first = vllm_engine.model_directory(shapes(), tmp_path)
    assert vllm_engine.model_directory(shapes(), tmp_path) == first
    assert vllm_engine.model_directory(shapes(hidden_size=16), tmp_path) != first
    (file,) = Path(first).iterdir()
    written = json.loads(file.read_text())
    assert (written["architectures"], written["hidden_size"]) == (["LlamaForCausalLM"], 8)


def test_a_checkpoint_is_read_where_it_is(tmp_path: Path) -> None:
    model = shapes() | {"path": "/some/checkpoint"}
    assert vllm_engine.model_directory(model, tmp_path / "none") == "/some/checkpoint"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("has_tiles", [True, False])
def test_the_system_is_asked_for_tiles_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch, has_tiles: bool
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True))
    vllm_engine.allow_tiles()
    assert asked == [True] * has_tiles


def test_code_that_was_compiled_as_a_whole_needs_no_finishing(monkeypatch: pytest.MonkeyPatch) -> None:
    def code() -> int:
        return 7

    loaded = SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=code))
    monkeypatch.setattr(torch.compiler, "load_compiled_function", lambda _file, **_: loaded)
    vllm_engine.load_what_was_compiled()
    found: Any = torch.compiler.load_compiled_function(io.BytesIO(), f_globals={})
    found._artifacts.compiled_fn.finalize_loading(None)
    assert found._artifacts.compiled_fn() == 7


def test_compiling_is_timed_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runner:
        def warming_up_model(self) -> None:
            pass

    module = ModuleType("vllm.v1.worker.cpu_model_runner")
    module.CPUModelRunner = Runner  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = Runner.warming_up_model
    with vllm_engine.timed_compiling() as spent:
        Runner().warming_up_model()
    assert len(spent) == 1
    assert spent[0] >= 0
    assert Runner.warming_up_model is before
