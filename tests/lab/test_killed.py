"""A few of the moments at which a command may be killed; `make soak` tries them all, with every signal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.killing import KILL_POINTS, KillPoint, check, forked
from tests.support.killer import find


def point(command: str, name: str) -> KillPoint:
    return next(each for each in KILL_POINTS if (each.command, each.name) == (command, name))


def test_every_moment_is_a_call_that_there_is() -> None:
    for each in KILL_POINTS:
        find(each.target)
    assert len(KILL_POINTS) >= 40
    assert len({(each.command, each.name) for each in KILL_POINTS}) == len(KILL_POINTS)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "name", "sign"),
    [
        ("run", "within a migration of the store", "SIGKILL"),
        ("sweep", "second point: between two files that the store copies", "SIGHUP"),
        ("tune", "in the midst of serving", "SIGTERM"),
    ],
)
def test_the_same_command_again_goes_on(command: str, name: str, sign: str, tmp_path: Path) -> None:
    check(point(command, name), sign, tmp_path, forked)
