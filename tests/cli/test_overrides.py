"""What is written on the command line, before Hydra reads it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from kvlab.cli.compose import compose_run
from kvlab.cli.known import aliases, known_keys
from kvlab.cli.overrides import written_out
from kvlab.errors import ConfigError


def test_every_alias_leads_to_a_setting() -> None:
    settings, sections, _ = known_keys()
    assert {*aliases().values()} <= {*settings, *sections}
    assert not {*aliases()} & {*settings, *sections}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("workload.prompt_len=8000", "workload.prompt_len={min: 8000, max: 8000}"),
        ("workload.output_len=1,20", "workload.output_len={min: 1, max: 1},{min: 20, max: 20}"),
        ("workload.prompt_len={min: 1, max: 2}", None),
        ("+model.architecture.num_hidden_layers=3", None),
        ("tags.a=b", None),
        ("kv=paged", None),
        ("--config-dir", None),
        ("--version", None),
    ],
)
def test_written_out(text: str, expected: str | None) -> None:
    assert written_out([text]) == [expected or text]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Qwen/Qwen3-0.6B"], "settings=Qwen/Qwen3-0.6B: is no setting; write key=value, as model=Qwen/Qwen3-0.6B"),
        (
            ["mine.jsonl"],
            "settings=mine.jsonl: is no setting; write key=value, as workload=recorded workload.path=mine.jsonl",
        ),
        (["--model", "qwen3_8b"], "option=--model: is no option; write model=qwen3_8b"),
        (["--max-num-seqs=4"], "option=--max-num-seqs: is no option; write scheduler.max_batch_size=4"),
        (
            shlex.split(
                "sglang serve --model-path org/name --tp 2 --chunked-prefill-size -1 --disable-radix-cache"
            ),
            "option=--model-path: is no option; write model=org/name executor.tensor_parallel=2 "
            "kv.prefix_sharing=false framework=sglang hardware=NAME; "
            "there is no setting for --chunked-prefill-size (prompts are always computed in chunks)",
        ),
        (["-tp", "2", "model=qwen3_8b"], "option=-tp: is no option; write executor.tensor_parallel=2"),
        (
            shlex.split(
                "vllm serve a/Model --kv-cache-dtype fp8 --enable-chunked-prefill --no-enable-prefix-caching "
                "--enforce-eager --max-model-len 16384 --api-key secret --speculative-config '{}' --unheard-of"
            ),
            "option=--kv-cache-dtype: is no option; write model=a/Model kv.dtype=fp8_e4m3 kv.prefix_sharing=false "
            "framework.cuda_graphs=false model.max_seq_len=16384 hardware=NAME; there is no setting for "
            "--enable-chunked-prefill (prompts are always computed in chunks), --api-key, --speculative-config (no "
            "simulation proposes tokens; engines that compute have scheduler.speculation.method), --unheard-of",
        ),
    ],
)
def test_what_is_written_as_for_other_programs_says_how_it_is_written_here(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        written_out(words)
    assert str(refused.value) == said


def test_choices_of_the_working_directory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a place, with 'marks'" / "conf" / "workload"
    folder.mkdir(parents=True)
    (folder / "evening.yaml").write_text("name: evening\nnum_requests: 7\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="workload=evening: unknown"):
        compose_run(["workload=evening"])
    monkeypatch.chdir(folder.parents[1])
    assert compose_run(["workload=evening"]).config.workload.num_requests == 7


def test_flags_may_stand_between_overrides() -> None:
    """Hydra's parser takes overrides on one side of a flag alone."""
    words = ["model=qwen3_tiny", "--config-dir", "mine", "~slo", "-m", "kv.block_size=8,16"]
    assert written_out(words) == ["--config-dir", "mine", "-m", "model=qwen3_tiny", "~slo", "kv.block_size=8,16"]
