"""docs/server.md: its example runs, and it names every field, path, metric and limit."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import pytest
from fastapi.routing import APIRoute

from kvlab.config.server import ServerConfig
from kvlab.engine.clock import PacedClock, WallClock
from kvlab.server.app import build_app
from kvlab.server.blocks import BlockTimes
from kvlab.server.bodies import CHANGES_MEANING, ChatRequest, CompletionRequest, StreamOptions
from kvlab.server.metrics import ServerMetrics
from tests.support.serving import served

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "server.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def test_its_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    command = rf"curl {ADDRESS}(\S+) -H 'Content-Type: application/json' \\\n +-d '(.*)'"
    ((path, body),) = re.findall(command, PAGE)
    with served() as server:
        exec(compile(example.replace(ADDRESS, server.url), "server.md", "exec"), {})
        answer = httpx.post(server.url + path, json=json.loads(body)).json()
        assert {route.path for route in build_app(server.serving).routes if isinstance(route, APIRoute)} <= paths()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "8 tokens"
    assert sum(line.startswith("[") for line in lines) == 8
    assert answer["usage"]["completion_tokens"] == 2


def paths() -> set[str]:
    """Those of the table, as the application writes them."""
    found = re.findall(r"`(?:GET|POST) (\S+)`", PAGE)
    return {path.replace("{name}", "{name:path}") for path in found}


def test_it_names_every_field() -> None:
    models = (CompletionRequest, ChatRequest, StreamOptions)
    fields = {name for model in models for name in model.model_fields} | set(CHANGES_MEANING)
    assert {name for name in fields if f"`{name}`" not in PAGE} == set()


def test_it_names_every_metric() -> None:
    metrics = ServerMetrics("tiny")
    metrics.watch(BlockTimes(1, WallClock()))
    metrics.watch_pace(PacedClock())
    metrics.describe_cache(block_size=16)
    metrics.watch_events(SimpleNamespace(published=0, dropped=0))  # type: ignore[arg-type]
    names = re.findall(r"^# TYPE (\S+)", metrics.text().decode(), re.MULTILINE)
    assert set(re.findall(r"`((?:vllm|kvlab):\w+)`", PAGE)) == {
        name for name in names if not name.endswith("_created")
    }


def test_the_command_names_every_setting() -> None:
    page = (DOCS / "commands" / "serve.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `server\.(\w+)=", page, re.MULTILINE))
    assert named == {field.name for field in dataclasses.fields(ServerConfig)}
