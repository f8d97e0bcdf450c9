"""Checkpoints written by strangers: each is refused with a sentence that names file and key, or is served."""

from __future__ import annotations

import builtins
import io
import json
import resource
import signal
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import pytest

import kvlab.cli.capacity
from kvlab.config import ModelConfig
from kvlab.errors import KvlabError
from kvlab.models.families import DEFAULTS, FAMILIES, decoder_config, read_config
from tests.security.checkpoints import (
    CONFIG,
    WEIGHTS,
    Mutation,
    damage,
    described_as,
    in_shards,
    instead,
    plant_code,
    serve,
    write_checkpoint,
)
from tests.security.hostile_checkpoints import (
    ADDRESS_SPACE,
    CONFIGS,
    HOSTILE,
    LLAMA3,
    SECONDS,
    SOUND,
    cached_by_a_hub,
)
from tests.support.commands import call


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A sound checkpoint."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    write_checkpoint(directory)
    return directory


@pytest.fixture
def guarded() -> Iterator[None]:
    """Ends a hang, and an allocation out of proportion, with an error that is not kvlab's."""

    def hung(*_: object) -> NoReturn:
        raise TimeoutError(f"{SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, hung)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ADDRESS_SPACE, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(("mutate", "sentence"), HOSTILE)
def test_a_hostile_checkpoint_is_refused_with_a_sentence(directory: Path, mutate: Mutation, sentence: str) -> None:
    mutate(directory)
    with pytest.raises(KvlabError) as refused:
        serve(directory)
    text = str(refused.value)
    assert sentence in text
    assert str(directory) in text
    assert text.isprintable()
    assert len(text.replace(str(directory), "")) < 500


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("mutate", SOUND.values(), ids=SOUND)
def test_an_odd_checkpoint_is_served(directory: Path, mutate: Mutation) -> None:
    mutate(directory)
    assert serve(directory) == [35, 10, 23, 39]


#: Any of them as the value of any key.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 3, -1, 2**31 - 1, 2**31, 10**29, 0.0, 0.5, -1.5, 1e-12, 1e12, 1e-300, 1e300),
    *(
        float("nan"),
        float("inf"),
        "",
        "x",
        "default",
        "full_attention",
        "\ud800",
        [],
        [1],
        [[1]],
        [None],
        {},
        {"a": 1},
    ),
    *(["sliding_attention"], {"rope_type": [1]}, {"rope_type": "linear", "factor": 1e-12}, {"type": {"a": 1}}),
    *({"full_attention": [1]}, {"full_attention": {"rope_theta": 0}}, {"sliding_attention": {}}, LLAMA3),
]
KEYS = {key for values in DEFAULTS.values() for key in values} | {
    *("model_type", "text_config", "auto_map", "attention_bias", "mlp_bias", "use_bidirectional_attention"),
    *("layer_types", "use_sliding_window", "sliding_window_pattern", "partial_rotary_factor"),
    *("rope_scaling", "rope_parameters", "rope_theta", "rope_local_base_freq"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_of_any_key_is_refused_or_described(family: str) -> None:
    described, sentences = 0, []
    for key, value in product(sorted(KEYS), VALUES):
        config = CONFIG | {"model_type": family, key: value}
        if family == "gemma3" and key not in ("model_type", "text_config"):
            config = {"model_type": family, "text_config": config}
        try:
            read_config(config)
            described += 1
        except KvlabError as error:
            sentences.append(str(error))
    assert all(map(str.isprintable, sentences))
    assert 100 < described < 0.7 * len(KEYS) * len(VALUES)


def test_random_damage_is_refused_or_served(tmp_path: Path) -> None:
    """`make soak` damages for longer."""
    said = [sentence for seed in range(100) if (sentence := damage(tmp_path, seed)) is not None]
    assert all(map(str.isprintable, said))
    assert 50 < len(said) < 100


def test_the_content_of_another_file_is_not_told(directory: Path) -> None:
    """Neither where an index names it nor where a link leads to it."""
    secret = directory.parent / "secret.safetensors"
    secret.write_text("hunter2 and more words than the length of a header takes")
    mutations = [in_shards({"a": "../secret.safetensors"}), in_shards({"a": str(secret)})]
    for name in ("config.json", WEIGHTS):
        mutations.append(instead(name, lambda file: file.symlink_to(secret)))
    for mutate in mutations:
        write_checkpoint(directory)
        mutate(directory)
        with pytest.raises(KvlabError) as refused:
            serve(directory)
        assert "hunter2" not in str(refused.value)
        for file in directory.iterdir():
            file.unlink()


@pytest.mark.parametrize("model_type", ["x", "llama"])
def test_code_in_a_checkpoint_never_runs(directory: Path, model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where somebody stands by to say yes: nobody is asked."""
    marker = plant_code(directory, model_type)
    monkeypatch.chdir(directory)
    answers = io.StringIO("y\n" * 10)
    monkeypatch.setattr(sys, "stdin", answers)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("a question was asked"))
    if model_type == "x":
        with pytest.raises(KvlabError, match="kvlab never runs the code that its auto_map names"):
            serve(directory)
    else:
        assert len(serve(directory)) == 4
    assert not marker.exists()
    assert answers.tell() == 0


def test_a_wide_model_of_a_few_bytes_takes_no_memory_to_describe(directory: Path) -> None:
    """Every size at its bound: only what is asked of the machine is refused, and that elsewhere."""
    described_as(vocab_size=2**31 - 1, hidden_size=2**30, intermediate_size=2**31 - 1, num_hidden_layers=10_000)(
        directory
    )
    began = time.thread_time()
    config = decoder_config(ModelConfig("wide", family=None, path=str(directory), max_seq_len=32))
    assert config.num_parameters > 10**20
    assert time.thread_time() - began < 1


class TestCapacity:
    """Exit code 2, one sentence, no traceback."""

    @pytest.mark.parametrize("what", ["null", "nested deeply", "a FIFO", "a list as text_config", "10**12 layers"])
    def test_of_what_is_hostile(self, directory: Path, what: str) -> None:
        CONFIGS[what][0](directory)
        ended = call(kvlab.cli.capacity.main, f"model={directory}", "memory=1GiB")
        assert ended.code == 2, ended.output
        assert "Traceback" not in ended.output

    def test_of_a_hubs_cache(self, directory: Path) -> None:
        cached_by_a_hub(directory)
        described: Any = CONFIG | {"head_dim": 8}
        (directory / "config.json").resolve().write_text(json.dumps(described))
        ended = call(kvlab.cli.capacity.main, f"model={directory}", "memory=1GiB", "model.max_seq_len=32")
        assert ended.code == 0, ended.output
