"""Calls that were found to stop the server, or to make it grow."""

from __future__ import annotations

import httpx2 as httpx
import pytest

from kvlab.config.server import ServerConfig
from kvlab.kv.prefix import salt_bytes
from tests.support.serving import Served, served

REQUEST = {"prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True}


def completion(server: Served, **fields: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=REQUEST | fields, timeout=30)


def test_a_salt_has_a_bound_and_the_index_keeps_little_of_a_long_one() -> None:
    with served() as server:
        assert completion(server, cache_salt="a" * 1024).status_code == 200
        refused = completion(server, cache_salt="a" * 1025)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "cache_salt: has 1025 characters; at most 1024"
    long, other = salt_bytes("a" * 10_000), salt_bytes("a" * 10_001)
    assert long != other
    assert len(long) < 64


def test_one_step_of_a_call_with_many_samples_fits_its_buffer() -> None:
    with served(config=ServerConfig(port=0, max_waiting_outputs=4)) as server:
        answer = completion(server, n=16, temperature=1.0, max_tokens=20, prompt=[[1, 2], [3, 4]])
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
        answer = httpx.get(f"{server.url}/v1/models/{'a' * 20_000}")
        assert answer.status_code == 404
        assert len(answer.text) < 1000
