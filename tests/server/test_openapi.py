"""The OpenAPI document against the server, by Schemathesis: every answer is one that the document has."""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx2 as httpx
import pytest

from experiments.environments import program
from tests.support.engines import assert_empty
from tests.support.model import tiny_config
from tests.support.pools import sharing_pool
from tests.support.serving import served

SCHEMATHESIS = "schemathesis==4.32.5"
# Limits that depend on the model, or on other fields, are no part of a schema: such requests get a 400.
UNCHECKED = "positive_data_acceptance"


@pytest.mark.slow
@pytest.mark.long
def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    try:
        schemathesis = program(SCHEMATHESIS, timeout_s=60)
    except RuntimeError as error:
        pytest.skip(f"Schemathesis cannot be had: {error}")
    # Each tenth token ends an answer: most of a thousand requests do not say how long it may be.
    with served(pool=sharing_pool(64), eos=tuple(range(0, tiny_config().vocab_size, 10))) as server:
        settings = ["--max-examples=2", "--seed=1", f"--exclude-checks={UNCHECKED}", "--no-color"]
        command: list[str | Path] = [schemathesis, "run", f"{server.url}/openapi.json", *settings]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout
    assert_empty(server.serving.engine.core)


def test_the_page_of_the_routes_loads_nothing_and_runs_no_script() -> None:
    with served() as server:
        answer = httpx.get(f"{server.url}/docs")
        paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert "script-src 'none'" in answer.headers["Content-Security-Policy"]
    assert "<script" not in answer.text
    assert "//" not in answer.text
    assert all(f"{method.upper()} {path}" in answer.text for path, methods in paths.items() for method in methods)
    assert "<td><code>max_tokens</code></td><td>integer</td>" in answer.text
    assert "<td><code>audit</code></td><td>boolean</td>" in answer.text
