"""Every choice of every group composes into a checked configuration, and every named combination too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from kvlab.cli import compose
from kvlab.config.workload import FILES
from kvlab.models.families import decoder_config
from kvlab.paths import CONF
from tests.support.plans import MODELS, compose_run
from tests.support.swept import SWEEPS, swept_values

NEEDS = {"model=checkpoint": ["model.path=somewhere"]}
NEEDS |= {f"workload={source}": ["workload.path=somewhere"] for source in FILES}
TOGETHER = ("model", "workload", "hardware")  # choices that go with each other, whichever they are
GROUPS = {
    folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in CONF.iterdir() if folder.is_dir()
}


@pytest.mark.parametrize("number", range(max(len(GROUPS[group]) for group in TOGETHER)))
def test_choices_compose(number: int) -> None:
    choices = [f"{group}={GROUPS[group][number % len(GROUPS[group])]}" for group in TOGETHER]
    needed = [setting for choice in choices for setting in NEEDS.get(choice, [])]
    compose_run("executor=simulated", *choices, *needed)


@pytest.mark.parametrize(
    "choice", [f"{group}={name}" for group in sorted(GROUPS.keys() - {*TOGETHER}) for name in GROUPS[group]]
)
def test_choice_composes(choice: str) -> None:
    compose_run(choice)


def test_a_configuration_is_written_so_that_all_texts_are_read_again() -> None:
    texts = {"line": "a\x85b", "number": "1e3", "word": "yes", "face": "\U0001f600", "long": "a b " * 60 + "c"}
    written = compose.compose_run([f"+tags.{name}='{text}'" for name, text in texts.items()]).yaml()
    assert OmegaConf.create(written).tags == texts


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_every_value_of_an_experiment_or_sweep_composes(name: str) -> None:
    """As it is; test_sweep_files.py runs them in small."""
    values = swept_values(name)
    for number in range(max(map(len, values), default=1)):
        compose_run(name, *[each[number % len(each)] for each in values])


@pytest.mark.parametrize("file", sorted(CONF.glob("**/*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_first_line_says_what_it_is_for(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert lines[1 if "@package" in lines[0] else 0].startswith("# ")


@pytest.mark.parametrize(
    ("name", "parameters", "bytes_per_token"),
    [
        # published parameter counts; 2 x layers x kv_heads x head_dim x 2 bytes
        ("qwen3_4b", 4.02e9, 147_456),
        ("qwen3_0_6b", 0.596e9, 114_688),
        ("llama3_2_1b", 1.236e9, 32_768),
        ("llama3_2_3b", 3.213e9, 114_688),
        ("qwen2_5_0_5b", 0.494e9, 12_288),
        ("gemma3_1b", 1.0e9, 26_624),
        ("smollm2_shapes", 134.5e6, 23_040),
        ("qwen3_mini", 41.56e6, 8_192),
        ("llama3_1_8b", 8.030e9, 131_072),
        ("llama3_1_70b", 70.554e9, 327_680),
        ("qwen3_8b", 8.191e9, 147_456),
        ("qwen3_14b", 14.768e9, 163_840),
        ("qwen3_32b", 32.762e9, 262_144),
        ("gemma3_27b", 27.009e9, 507_904),
        ("llama_tiny", 139_584, 256),
        ("qwen2_tiny", 107_072, 256),
        ("qwen3_tiny", 131_520, 512),
        ("gemma3_tiny", 168_960, 384),
    ],
)
def test_model_has_its_published_size(name: str, parameters: float, bytes_per_token: int) -> None:
    config = decoder_config(compose_run(f"model={name}").model)
    assert config.num_parameters == pytest.approx(parameters, rel=0.005)
    assert config.kv_spec("bfloat16").bytes_per_token == bytes_per_token


def test_every_model_is_checked_above() -> None:
    assert MODELS == [
        "gemma3_1b",
        "gemma3_27b",
        "gemma3_tiny",
        "llama3_1_70b",
        "llama3_1_8b",
        "llama3_2_1b",
        "llama3_2_3b",
        "llama_tiny",
        "qwen2_5_0_5b",
        "qwen2_tiny",
        "qwen3_0_6b",
        "qwen3_14b",
        "qwen3_32b",
        "qwen3_4b",
        "qwen3_8b",
        "qwen3_mini",
        "qwen3_tiny",
        "smollm2_shapes",
    ]


@pytest.mark.parametrize("name", MODELS)
def test_model_has_as_many_parameters_as_transformers_gives_it(name: str) -> None:
    model = compose_run(f"model={name}").model
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(model.family, **model.architecture))
    assert decoder_config(model).num_parameters == sum(parameter.numel() for parameter in reference.parameters())
