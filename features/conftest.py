"""Set-up of the executable requirements: steps, fixtures, and how a tag becomes a marker.

A scenario tagged `@R1.2` carries the markers `R1.2` and `R1`: `pytest features -m R1.2`, `pytest features -m R1`.
One tagged `@every_backend` runs once for each attention backend of the registry; the runs of one tagged `@tracked`
are in the tracking store.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.fixtures import FixtureDef, FixtureManager
from _pytest.nodes import Node
from pytest_bdd import parsers
from pytest_bdd.compat import get_fixture_names, getfixturedefs
from pytest_bdd.parser import Step
from pytest_bdd.parsers import StepParser
from pytest_bdd.steps import StepFunctionContext, step_function_context_registry

from features.steps.advice_steps import *
from features.steps.allocation_steps import *
from features.steps.allocator_steps import *
from features.steps.attention_steps import *
from features.steps.backend_steps import *
from features.steps.canary_steps import *
from features.steps.capacity_steps import *
from features.steps.checkpoints import Checkpoints
from features.steps.disk_steps import *
from features.steps.ending_steps import *
from features.steps.engine_steps import *
from features.steps.engines_steps import *
from features.steps.eviction_steps import *
from features.steps.explain_steps import *
from features.steps.fetch_steps import *
from features.steps.fleet_planning_steps import *
from features.steps.fleet_steps import *
from features.steps.fork_steps import *
from features.steps.format_steps import *
from features.steps.hostile_steps import *
from features.steps.http_limits_steps import *
from features.steps.http_steps import *
from features.steps.http_stream_steps import *
from features.steps.isolation_steps import *
from features.steps.kernel_steps import *
from features.steps.metrics_steps import *
from features.steps.model_steps import *
from features.steps.my_traffic_steps import *
from features.steps.offload_steps import *
from features.steps.pacing_steps import *
from features.steps.page_steps import *
from features.steps.peer_steps import *
from features.steps.pool_steps import *
from features.steps.rank_steps import *
from features.steps.recorder_steps import *
from features.steps.recovery_steps import *
from features.steps.replay_steps import *
from features.steps.report_steps import *
from features.steps.responses_steps import *
from features.steps.retention_steps import *
from features.steps.route_steps import *
from features.steps.router_steps import *
from features.steps.run_steps import *
from features.steps.sample_steps import *
from features.steps.scheduling_steps import *
from features.steps.server_process_steps import *
from features.steps.service_level_steps import *
from features.steps.sharing_server_steps import *
from features.steps.sharing_steps import *
from features.steps.simulation_steps import *
from features.steps.sizing_steps import *
from features.steps.stand_in_steps import *
from features.steps.stats_steps import *
from features.steps.structured_steps import *
from features.steps.sweep_steps import *
from features.steps.table_steps import *
from features.steps.text_steps import *
from features.steps.tracking_steps import *
from features.steps.traffic_steps import *
from features.steps.transformers_steps import *
from features.steps.watch_steps import *
from features.steps.weights_steps import *
from features.steps.windows_steps import *
from kvlab.attention.registry import attention_backends
from kvlab.kernels.cpu.interface import WeightFormat
from kvlab.kernels.cpu.native import load
from tests.support.drawn import in_few_dots

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which nothing above does

_REQUIREMENT = re.compile(r"(R\d+)\.\d+")


def pytest_configure(config: pytest.Config) -> None:
    """Register the requirement tags of all feature files as markers."""
    text = "\n".join(file.read_text() for file in Path(__file__).parent.glob("*.feature"))
    for tag, chapter in sorted(set(re.findall(rf"@({_REQUIREMENT.pattern})", text))):
        config.addinivalue_line("markers", f"{tag}: a scenario of this requirement")
        config.addinivalue_line("markers", f"{chapter}: a scenario of this chapter")


def pytest_bdd_apply_tag(tag: str, function: Callable[..., Any]) -> bool | None:
    """Turn a requirement's tag into its markers, `every_backend` into a parameter, `avx512` into a condition, and
    `tracked` into runs that the tracking store has.
    """
    if match := _REQUIREMENT.fullmatch(tag):
        for name in match.group(0, 1):
            getattr(pytest.mark, name)(function)
        return True
    if tag == "every_backend":
        pytest.mark.usefixtures("backend_name")(function)
        return True
    if fixture := {"avx512": "avx512", "tracked": "tracked_runs"}.get(tag):
        pytest.mark.usefixtures(fixture)(function)
        return True
    return None


def _first_word(parser: StepParser) -> str:
    """That of every step which it matches; empty: they have different ones."""
    word = "" if isinstance(parser, parsers.re) else parser.name.partition(" ")[0].lower()
    return "" if "{" in word else word


@pytest.fixture(scope="session", autouse=True)
def _steps_found_once() -> Iterator[None]:
    """pytest-bdd tries each fixture there is on each step of each scenario, which takes longer than most steps."""
    definitions: dict[Path, list[tuple[FixtureDef[object], StepFunctionContext, str]]] = {}
    found: dict[tuple[Path, str, str], list[FixtureDef[object]]] = {}

    def find(step: Step, fixturemanager: FixtureManager, node: Node) -> list[FixtureDef[object]]:
        if node.path not in definitions:
            contexts = [
                (each, step_function_context_registry[each.func])
                for name in get_fixture_names(fixturemanager)
                for each in getfixturedefs(fixturemanager, name, node) or ()
                if each.func in step_function_context_registry
            ]
            definitions[node.path] = [(*pair, _first_word(pair[1].parser)) for pair in contexts]
        key = node.path, step.type, step.name
        if key not in found:
            words = "", step.name.partition(" ")[0].lower()
            found[key] = [
                each
                for each, context, word in definitions[node.path]
                if word in words and context.type in (None, step.type) and context.parser.is_matching(step.name)
            ]
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("pytest_bdd.scenario"), "find_fixturedefs_for_step", find)
        yield


@pytest.fixture
def avx512() -> None:
    """Skip what only processors with AVX-512 do: weights in 12 bits."""
    if not load().kvlab_packed_linear_bytes(1, 32, WeightFormat.COMPACT, 2):
        pytest.skip("needs AVX-512")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """These models are too small to share among threads, which cost more than they give on a busy machine."""
    torch.set_num_threads(1)  # a run in this process sets its own


#: By what is written at its axes.
_PICTURES: dict[tuple[str, ...], bytes] = {}


@pytest.fixture(autouse=True)
def _figures_once_in_few_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenarios ask which figures there are. How they look, most of the work, is tested in tests/lab: one of each
    kind is drawn.
    """
    if "kvlab.lab.figures.style" not in sys.modules:
        return
    from matplotlib.figure import Figure

    draw = Figure.savefig

    def save(self: Figure, file: Path | BytesIO, **how: Any) -> None:
        if isinstance(file, BytesIO):
            draw(self, file, **how)
            return
        texts = [(axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) for axes in self.axes]
        kind = file.suffix, *chain.from_iterable(texts)
        if kind not in _PICTURES:
            draw(self, file, **how)
            _PICTURES[kind] = file.read_bytes()
        file.write_bytes(_PICTURES[kind])

    in_few_dots(monkeypatch)
    monkeypatch.setattr(Figure, "savefig", save)


#: Triton's interpreter computes number by number.
_INTERPRETED = [] if torch.cuda.is_available() else ["triton"]


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.slow if name in _INTERPRETED else ()) for name in attention_backends()
    ]
)
def backend_name(request: pytest.FixtureRequest) -> str:
    """The attention backend that a scenario tagged `every_backend` runs with."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Small models that transformers wrote, each made once."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
