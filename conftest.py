"""The session of tests: apart from what its user has; in several processes, `pytest -n 2`, which share the cores
and what each would have to make for itself.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache

import pytest

from tests.support import isolation

_home = isolation.isolate(os.environ)  # ahead of kvlab, and None in a worker
sys.dont_write_bytecode = False  # it was read from there as Python started: each worker would compile all tests

if "PYTEST_XDIST_WORKER" in os.environ:  # ahead of torch, which reads it as it is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_unconfigure() -> None:
    """Leave nothing of the session's home."""
    if _home is not None:
        isolation.end(_home)


def pytest_plugin_registered(plugin: object, manager: pytest.PytestPluginManager) -> None:
    """Let a process that only hands tests to others import nothing for them, before which these do not start."""
    if isinstance(plugin, pytest.Config) and "PYTEST_XDIST_WORKER" not in os.environ:
        asked = plugin.known_args_namespace
        if getattr(asked, "numprocesses", None) and not asked.collectonly and not asked.usepdb:
            # Those of the folders below follow in the loop that has just imported this one.
            manager._importconftest = lambda *_, **__: sys.modules[__name__]  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect the tests without the garbage collector: they are a million objects that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first: at the end, the other processes would wait for one that has them left."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many checks there are, and how many cases their grids make of them."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    if cases := [report.nodeid for report in reports if report.when == "call"]:
        checks = {nodeid.partition("[")[0] for nodeid in cases}
        terminalreporter.write_line(f"{len(checks):,} checks in {len(cases):,} cases")


@pytest.fixture(scope="session", autouse=True)
def _compose_once() -> Iterator[None]:
    """Compose each configuration once, where tests compose any."""
    with pytest.MonkeyPatch.context() as patch:
        if "hydra" in sys.modules:
            from tests.support.composing import keep_compositions

            keep_compositions(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _fast_interpreter() -> Iterator[None]:
    """Triton's interpreter takes the place of a GPU."""
    from tests.support.interpreter import hasten

    with pytest.MonkeyPatch.context() as patch:
        hasten(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _yaml_read_by_libyaml() -> Iterator[None]:
    """OmegaConf and the tables of measured operations read it in Python, ten times as long."""
    with pytest.MonkeyPatch.context() as patch:
        if "yaml" in sys.modules:
            import yaml

            patch.setattr(yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        yield


@pytest.fixture(scope="session", autouse=True)
def _authorities_read_once() -> Iterator[None]:
    """Each client, of the servers on this machine too, reads the certificates that it would trust elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        if "httpcore2" in sys.modules:
            import httpcore2

            patch.setattr(httpcore2, "default_ssl_context", cache(httpcore2.default_ssl_context))
        yield


#: How many modules there were as objects were last left out of garbage collections; 0: none are left out.
_modules = 0


def _leave_out_of_collections() -> None:
    global _modules
    gc.collect()
    gc.freeze()
    _modules = len(sys.modules)


def pytest_runtest_logstart() -> None:
    """Leave out what tests have imported since, too: each run of a sweep ends with a collection of all objects."""
    if _modules and len(sys.modules) > _modules + 100:
        _leave_out_of_collections()


@pytest.fixture(scope="session", autouse=True)
def _as_one_burst_of_requests() -> Iterator[None]:
    """Leave what was imported and collected out of garbage collections: a million objects, which each run of a test
    would count, and collections of all objects pass through.
    """
    from kvlab.engine import garbage

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage, "_users", 1)  # those in tests are not the last, which restores the settings
        _leave_out_of_collections()
        gc.set_threshold(50_000, 20, 100)  # as while requests are served
        yield  # still frozen at the end, when pytest and the interpreter look for objects that are left


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Build the native kernels once, before the workers start."""
    if getattr(session.config.option, "numprocesses", None) and not hasattr(session.config, "workerinput"):
        from kvlab.errors import KernelError
        from kvlab.kernels.cpu.native import load

        with suppress(KernelError):
            load()
