"""Paged attention step by step: each version gives transformers' tokens, and fits on a screen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from experiments.paged_attention_step_by_step.run import (
    ALONE,
    PADDED,
    VERSIONS,
    Version,
    compare,
    make_requests,
    table,
)
from experiments.paged_attention_step_by_step.words import SLOTS, speak
from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.plugins import _loaded
from tests.support.published import dequantised_once, smollm2_file

ROOT = Path(__file__).parents[2]
PLUGIN = "experiments.paged_attention_step_by_step.ragged"


@pytest.fixture
def no_plugin_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the experiment registers is gone after the test."""
    known = {name: ATTENTION_BACKENDS.get(name) for name in ATTENTION_BACKENDS.names()}
    monkeypatch.setattr(ATTENTION_BACKENDS, "_entries", known)
    monkeypatch.setattr("kvlab.plugins._loaded", dict(_loaded))
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)


@pytest.mark.usefixtures("no_plugin_stays")
def test_every_version_gives_the_tokens_of_transformers() -> None:
    threads = torch.get_num_threads()
    requests = make_requests(4, 512, (5, 40), 6)
    try:
        found = compare("qwen3_tiny", requests, rounds=1)
    finally:
        torch.set_num_threads(threads)
    expected = found[ALONE][0].tokens
    assert len({tuple(tokens) for tokens in expected}) == 4  # the model does listen to its prompt
    assert {version.name: answer.tokens for version, (answer, _) in found.items()} == dict.fromkeys(
        [version.name for version in found], expected
    )
    work = {version.name: (answer.passes, answer.together) for version, (answer, _) in found.items()}
    one_by_one, all_at_once = (24, 1), (6, 4)
    assert work == {
        ALONE.name: one_by_one,
        PADDED.name: all_at_once,
        "v1": one_by_one,
        "v2, safe softmax": one_by_one,
        "v2, online softmax": one_by_one,
        "v3": (24, 4),
        "v4": all_at_once,
        "v4, native": all_at_once,
    }
    assert table(found).count("| the same |") == len(found)
    found[VERSIONS[0]][0].tokens[0][-1] += 1
    assert "**differ**" in table(found)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_the_file_to_read_is_short(version: Version) -> None:
    assert len((ROOT / version.file).read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.slow
@pytest.mark.usefixtures("no_plugin_stays")
def test_a_published_model_answers_in_the_same_words() -> None:
    smollm2_file()
    threads = torch.get_num_threads()
    versions = [version for version in (SLOTS, *VERSIONS) if version.name in ("slots", "v1", "v3", "v4")]
    try:
        with dequantised_once():
            spoken = speak("model=smollm2_135m", "kv.memory=128MiB", tokens=5, versions=versions)
    finally:
        torch.set_num_threads(threads)
    assert {said.texts for said in spoken.values()} == {("The capital of France is", "The journey takes 1")}
    by_name = {version.name: said for version, said in spoken.items()}
    assert by_name["slots"].padding > 1900, "two slots of 1,024 tokens"
    assert by_name["v1"].padding < 16, "one sequence: less than a block"
    assert by_name["v3"].padding == by_name["v4"].padding < 32
