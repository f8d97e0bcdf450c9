"""How an optional package is said to be installed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kvlab.extras import install_command

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


@pytest.mark.parametrize("extra", ["joblib", "slurm", "ray", "silicon", "postgres", "otel", "events"])
def test_by_the_names_that_an_index_has(extra: str) -> None:
    command = install_command(extra)
    assert command.startswith("pip install ")
    for wanted in EXTRAS[extra]:
        assert wanted.partition(";")[0].partition(">")[0].partition("=")[0].strip() in command
    assert "kvlab" not in command


def test_without_metadata_of_such_an_extra() -> None:
    assert install_command("nothing") == "pip install -e '.[nothing]'"
