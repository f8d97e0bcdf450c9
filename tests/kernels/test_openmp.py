"""How long OpenMP's threads wait, as OpenMP itself says it when it is loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvlab.kernels.openmp import BRIEF, wait_briefly, without_brief_waiting

LIBGOMP = next(iter(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))), None)


@pytest.mark.skipif(LIBGOMP is None, reason="this torch brings another OpenMP")
@pytest.mark.parametrize(
    ("environment", "rounds"),
    [
        ({}, BRIEF["GOMP_SPINCOUNT"]),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "passive"}, "0"),
    ],
)
def test_a_process_that_imports_kvlab_first_waits_briefly(environment: dict[str, str], rounds: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in BRIEF}
    loaded = subprocess.run(
        [sys.executable, "-c", f"import kvlab, ctypes; ctypes.CDLL({str(LIBGOMP)!r})"],
        env=inherited | {"OMP_DISPLAY_ENV": "VERBOSE"} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", loaded.stderr) == [rounds]


def test_what_would_come_too_late_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BRIEF:
        monkeypatch.delenv(name, raising=False)
    assert "torch" in sys.modules
    wait_briefly()
    assert not BRIEF.keys() & os.environ.keys()


def test_other_programs_wait_as_they_would_without_kvlab() -> None:
    assert without_brief_waiting(BRIEF | {"PATH": "/bin"}) == {"PATH": "/bin"}
    asked = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "7"}
    assert without_brief_waiting(asked) == asked
