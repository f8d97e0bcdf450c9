"""Processes that work for others."""

import subprocess
import sys

import pytest

_WORKER = """
import os, signal, time
from kvlab.lab.processes import end_with
parent = os.getpid()
if os.fork() == 0:
    end_with(parent)
    os.kill(parent, signal.SIGKILL)
time.sleep(90)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_worker_ends_with_a_parent_that_is_killed() -> None:
    # The pipe is closed when the last of both has ended.
    command = [sys.executable, "-c", _WORKER]
    ended = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=False)
    assert ended.returncode == -9
