"""Steps about runs of several ranks: their tokens, and what is left of their processes."""

from __future__ import annotations

import signal

import psutil
import pytest
from pytest_bdd import parsers, then, when

from features.steps.run_steps import Runner, long_run
from tests.support.commands import Command
from tests.support.forked import Forked
from tests.support.serving import wait_until

TWO = "executor.tensor_parallel=2"


@pytest.fixture
def ranks() -> list[psutil.Process]:
    """The processes of the ranks beside rank 0."""
    return []


@when(parsers.parse("I start a run of two ranks that would take minutes and {strike} once it produces tokens"))
def start_and_strike(lab: Runner, commands: list[Command], ranks: list[psutil.Process], strike: str) -> None:
    def struck(process: Forked) -> None:
        ranks.extend(psutil.Process(process.pid).children())
        if strike == "kill rank 1":
            (rank,) = ranks
            rank.kill()
        else:
            process.send_signal(getattr(signal, strike.removeprefix("send it ")))

    commands.append(long_run(lab, struck, TWO))


@then("both runs gave the same tokens")
def same_tokens(commands: list[Command]) -> None:
    one, two = ([row["output_token_ids"] for row in each.rows("requests.parquet")] for each in commands[-2:])
    assert one == two
    assert len(one) == 4


@then("no rank of it is left")
def none_is_left(ranks: list[psutil.Process]) -> None:
    assert ranks
    wait_until(lambda: not any(rank.is_running() for rank in ranks))
