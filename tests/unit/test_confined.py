"""Processes with limits that answer questions; the one here renders templates."""

from __future__ import annotations

import gc
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvlab.confined import Confined, ConfinedError


def confined() -> Confined:
    return Confined("kvlab.models.template_process", memory=256 << 20, seconds=30)


def rendered(process: Confined, value: object) -> object:
    question = {"template": "{{ value }}", "variables": {"value": value}}
    return json.loads(process.ask(json.dumps(question).encode()))["text"]


def number_of(process: Confined) -> int:
    assert process._process is not None
    return process._process.running.pid


def is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_threads_get_their_own_answers_from_one_process() -> None:
    process = confined()
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda value: rendered(process, value), range(64))) == list(map(str, range(64)))


def test_a_process_that_ends_is_followed_by_another() -> None:
    process = confined()
    assert rendered(process, 1) == "1"
    first = number_of(process)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(ConfinedError, match="ended its process, with code -9"):
        rendered(process, 2)
    assert rendered(process, 3) == "3"
    assert number_of(process) != first


def test_a_process_ends_with_the_object() -> None:
    process = confined()
    rendered(process, 1)
    number = number_of(process)
    del process
    gc.collect()
    assert not is_running(number)


def test_a_fork_has_a_process_of_its_own() -> None:
    process = confined()
    rendered(process, 1)
    first = number_of(process)
    child = os.fork()
    if not child:
        try:
            own = rendered(process, 2) == "2" and number_of(process) != first
        finally:
            os._exit(0 if own else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rendered(process, 3) == "3"
    assert number_of(process) == first
