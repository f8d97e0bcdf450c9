"""Models that transformers wrote and computes, served from kvlab's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_bdd import given, parsers, then, when

from tests.support.transformers_models import MEMORIES, Written, expected_tokens, served, write_model


@pytest.fixture
def all_answers() -> list[list[list[int]]]:
    """Those of each time that the prompts were served."""
    return []


@given(parsers.parse("a small {family} that transformers wrote"), target_fixture="written")
def small_model(tmp_path: Path, family: str) -> Written:
    return write_model(family, tmp_path)


@when(parsers.parse("six prompts of 5 to 50 tokens are served in {memory}"))
def serve_prompts(written: Written, memory: str, all_answers: list[list[list[int]]]) -> None:
    all_answers.append(served(written, MEMORIES[memory]))


@then("every answer is that of transformers' own generate")
def answers_of_transformers(written: Written, all_answers: list[list[list[int]]]) -> None:
    assert all_answers == [expected_tokens(written)] * len(all_answers)
