"""Commands in a locale whose encoding is ASCII."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import TINY

SWEEP = ("kv=contiguous,paged", "tracking=off", "hydra.sweep.dir=out")
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


@pytest.mark.slow
def test_a_comparison_is_printed_in_the_characters_that_there_are(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvlab.cli", "run", "-m", *TINY, *SWEEP]
    environment = {**os.environ, **ASCII}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    text = done.stdout.decode("ascii")
    assert done.returncode == 0, text + done.stderr.decode("ascii")
    assert "2 runs: 2 finished" in text
    assert "| kv=contiguous |" in " ".join(text.split())
