"""How many tokens a simulated server takes of a model whose file does, or does not, say how long its context is."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvlab.cli.compose import compose_run
from kvlab.lab.run.execute import execute
from kvlab.lab.terminal import Terminal
from tests.support.runs import FEW_STEPS, context_of

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
}
GEMMA = LLAMA | {"model_type": "gemma3_text", "max_position_embeddings": 4096, "head_dim": 16, "sliding_window": 64}
SILENT = "model.max_seq_len=1024 unless it is set: "


@pytest.mark.parametrize(
    ("values", "settings", "longest", "said"),
    [
        (LLAMA, [], 1024, True),
        (LLAMA, ["model.max_seq_len=2000"], 2000, False),
        (LLAMA | {"max_position_embeddings": 3000}, [], 3000, False),
        ({"model_type": "gemma3", "text_config": GEMMA}, [], 4096, False),
    ],
)
def test_what_is_not_known_is_said(
    values: dict[str, Any], settings: list[str], longest: int, said: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    few = [text for text in FEW_STEPS if not text.startswith(("model", "executor"))]
    own = ["hardware=h100_sxm", "executor.timing=roofline", f"model={tmp_path}"]
    config = compose_run([*few, *own, *settings]).config
    assert config.model.max_seq_len == longest
    console = Terminal(file=io.StringIO(), width=200)
    execute(context_of(config, tmp_path / "run", console))
    assert (SILENT in console.file.getvalue()) == said  # type: ignore[attr-defined]
