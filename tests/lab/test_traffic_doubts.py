"""What an import says of requests whose figures contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlab.cli import import_
from tests.support.commands import call

ROWS = "time,prompt_tokens,output_tokens,cached_tokens\n1,20,5,{}\n2,20,5,20\n3,20,5,16\n"
SAID = "  cached_tokens is more than prompt_tokens in 1 of 3 requests: one of the two counts something else\n"


@pytest.mark.parametrize(("cached", "said"), [(21, True), (20, False)])
def test_more_cached_tokens_than_the_prompt_has(
    cached: int, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.csv").write_text(ROWS.format(cached), encoding="utf-8")
    imported = call(import_.main, "own.csv", "to=own.jsonl")
    assert imported.code == 0
    assert (SAID in imported.output) == said
    again = call(import_.main, "own.jsonl", "to=own.parquet")
    assert (SAID in again.output) == said
