"""Calls that were found to stop the server, or to make it grow."""

from __future__ import annotations

import httpx2 as httpx
import pytest

from kvlab.config.server import ServerConfig
from tests.support.serving import Served, served

REQUEST = {"prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True}


def completion(server: Served, **fields: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=REQUEST | fields, timeout=30)


def test_one_step_of_a_call_with_many_samples_fits_its_buffer() -> None:
    with served(config=ServerConfig(port=0, max_waiting_outputs=4)) as server:
        # Two steps, as many as may wait however late the server's loop comes to them.
        answer = completion(server, n=16, temperature=1.0, max_tokens=2, prompt=[[1, 2], [3, 4]])
    assert len(answer.json()["choices"]) == 32


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200),
        ("LOCALHOST", 200),
        ("[::1]:80", 200),
        ("other.example", 200),
        ("evil.example", 403),
        ("", 403),
    ],
)
def test_a_server_on_loopback_answers_to_its_own_names(host: str, status: int) -> None:
    with served(config=ServerConfig(port=0, allowed_hosts=["Other.example"])) as server:
        assert httpx.get(f"{server.url}/version", headers={"Host": host}).status_code == status


def test_a_query_that_is_wrong_is_a_mistake_of_the_client() -> None:
    with served() as server:
        answer = httpx.get(f"{server.url}/health?audit=xyz")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "audit")
        answer = completion(server, repetition_penalty=1e-40)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "repetition_penalty")
        for path in ("v1/models/", ""):
            answer = httpx.get(f"{server.url}/{path}{'a' * 20_000}")
            assert answer.status_code == 404
            assert len(answer.text) < 1000
