"""The README's example of the library, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, "README.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("greedy 0 ") for line in lines) == 8
    assert {line.split()[1] for line in lines if line.startswith("warm ")} == {"0", "1"}
    assert sum(line.startswith(("first ", "second ")) for line in lines) == 8
    assert not names["engine"].core.pool.audit()
