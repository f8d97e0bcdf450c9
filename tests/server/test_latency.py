"""What a client waits for beside the engine."""

from __future__ import annotations

import gc
import socket
import time

import httpx2 as httpx
import pytest

from kvlab.core import RequestRecord
from tests.support.serving import served


def test_chunks_are_sent_at_once_not_after_the_acknowledgement_of_the_last() -> None:
    with served() as server, httpx.Client(base_url=server.url) as client:
        client.get("/health")
        (connection,) = server.server.server_state.connections
        transport = connection.transport
        assert transport is not None
        sent_at_once = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert sent_at_once


@pytest.mark.usefixtures("no_requests_are_served")
def test_the_garbage_collector_is_rare_while_there_is_nothing_to_do_too() -> None:
    before = gc.get_threshold()
    with served():
        assert gc.get_threshold() > before
    assert gc.get_threshold() == before


def test_a_request_arrives_before_its_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[RequestRecord] = []
    with served() as server:
        model, metrics = server.serving.model, server.serving.metrics
        assert model.tokenizer is not None
        encode = model.tokenizer.encode

        def slowly(text: str) -> list[int]:
            time.sleep(0.05)
            return encode(text)

        monkeypatch.setattr(model.tokenizer, "encode", slowly)
        monkeypatch.setattr(metrics, "finish", records.append)
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 2, "ignore_eos": True})
    assert records[0].ttft_ms is not None
    assert records[0].ttft_ms >= 50
