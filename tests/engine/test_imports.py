"""The engine needs torch, numpy and safetensors: nothing of transformers, the commands or the laboratory. Plans and
simulations do without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

SCRIPT = """
import sys

BLOCKED = {
    "transformers", "huggingface_hub", "hydra", "omegaconf", "mlflow", "pyarrow", "rich", "scipy", "optuna",
    "matplotlib", "plotly", "psutil", "filelock", "jinja2", "yaml",
}


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is imported")


sys.meta_path.insert(0, Blocker())

import kvlab
from kvlab.config import EngineConfig, KVConfig, ModelConfig

for model in (
    ModelConfig("tiny", "llama", dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=100,
                                      num_attention_heads=4, num_key_value_heads=2)),
    ModelConfig("checkpoint", family=None, path=sys.argv[1], weights=None),
):
    engine = kvlab.Engine.from_config(EngineConfig(model, kv=KVConfig(num_blocks=64)))
    request = kvlab.Request("a", (1, 2, 3), kvlab.SamplingParams(max_tokens=5, ignore_eos=True))
    print(*[output.token_id for output in engine.generate(request)])
"""


def test_an_engine_generates_without_what_it_does_not_need(tmp_path: Path) -> None:
    """From values and from a directory; the tokens of the second are those of transformers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        max_position_embeddings=2048,
    )
    reference = AutoModelForCausalLM.from_config(config).float().eval()
    config.save_pretrained(tmp_path)
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    described, read = ([int(token) for token in line.split()] for line in done.stdout.splitlines())
    assert len(described) == 5
    ids = torch.tensor([[1, 2, 3]])
    expected = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert read == expected[0, 3:].tolist()


WITHOUT_TORCH = """
import sys

from kvlab.cli.main import main

main()
assert "torch" not in sys.modules, "torch is imported"
"""


@pytest.mark.parametrize(
    "command",
    [
        "capacity model=qwen3_4b memory=16GiB",
        "capacity model=llama3_1_8b hardware=h100_sxm",
        "run executor=simulated hardware=h100_sxm model=llama3_1_8b workload=burst16 kv.offload=1GiB tracking=off "
        "figures=false",
    ],
)
def test_plans_and_simulations_do_without_torch(command: str, tmp_path: Path) -> None:
    """Importing it takes most of the time that they need."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
