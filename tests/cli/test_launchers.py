"""Work that a launcher of Hydra runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlab.cli.launchers import launched
from kvlab.cli.on_ray import _lost
from kvlab.errors import ConfigError

BASIC = ("hydra/launcher=basic",)


def test_each_task_has_its_result(tmp_path: Path) -> None:
    done = launched(str.upper, ["a", "b", "c"], words=BASIC, directory=tmp_path / "it's, here")
    assert list(done) == [("a", "A"), ("b", "B"), ("c", "C")]
    assert (tmp_path / "it's, here").is_dir()


def test_a_single_task_is_done_here(tmp_path: Path) -> None:
    assert list(launched(str.upper, ["a"], words=["hydra/launcher=none_such"], directory=tmp_path)) == [("a", "A")]


def test_what_a_launcher_fails_of_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hydra/launcher=basic: failed: ValueError: no a"):
        list(launched(_refuse, ["a", "b"], words=BASIC, directory=tmp_path))
    with pytest.raises(ConfigError, match="hydra/launcher=none_such: unknown; known: basic"):
        list(launched(str.upper, ["a", "b"], words=["hydra/launcher=none_such"], directory=tmp_path))


def test_a_task_that_ray_lost_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hydra/launcher=ray: lost this run: a node died"):
        _ = _lost(tmp_path, 3, RuntimeError("a node died")).return_value


def _refuse(task: str) -> str:
    raise ValueError(f"no {task}")
