"""The examples of the library, as they stand in the pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run_example(page: str) -> dict[str, Any]:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, page, "exec"), names)
    return names


def test_the_readme_has_an_engine_that_answers(capsys: pytest.CaptureFixture[str]) -> None:
    engine = run_example("README.md")["engine"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines[-1].endswith(" length")
    assert not engine.core.pool.audit()


def test_the_library_page_generates_and_streams(capsys: pytest.CaptureFixture[str]) -> None:
    engine = run_example("docs/library.md")["engine"]
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("greedy 0 ") for line in lines) == 8
    assert {line.split()[1] for line in lines if line.startswith("warm ")} == {"0", "1"}
    assert sum(line.startswith(("first ", "second ")) for line in lines) == 8
    assert not engine.core.pool.audit()


def test_the_pool_and_attention_need_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("docs/extending/parts.md")
    forked, written, end = capsys.readouterr().out.splitlines()
    assert forked == "after the fork [0 1] [0 1]"
    assert written.endswith("(2, 4, 16)")
    assert written != forked
    assert end == "at the end 0 in use, 1 cached, audit []"
