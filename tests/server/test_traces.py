"""A span for each request."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx2 as httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvlab.config.server import ServerConfig
from kvlab.engine.step import StepInput, StepResult
from kvlab.errors import ConfigError
from kvlab.kv.view import CacheView
from kvlab.server.traces import Traces
from tests.support.executors import RecordingExecutor
from tests.support.serving import Served, served, wait_until

PROMPT = [5, 6, 7, 8]


class Failing(RecordingExecutor):
    """Fails in each pass."""

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        raise ArithmeticError("the device fell over")


def ask(server: Served, **fields: object) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, **fields}
    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    httpx.post(f"{server.url}/v1/completions", json=body, headers=parent, timeout=30)


def test_a_request_is_a_span_of_its_caller_with_all_its_samples() -> None:
    spans = InMemorySpanExporter()
    with served() as server:
        server.serving.traces = Traces("tiny", SimpleSpanProcessor(spans))
        ask(server, n=2, temperature=0.5)
        wait_until(spans.get_finished_spans)
    (span,) = spans.get_finished_spans()
    found = dict(span.attributes or {})
    assert span.name == "llm_request"
    assert span.parent is not None
    assert f"{span.parent.trace_id:x}" == "af7651916cd43dd8448eb211c80319c"
    assert found["gen_ai.response.model"] == "tiny"
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (4, 6)
    assert (found["gen_ai.request.n"], found["gen_ai.request.temperature"]) == (2, 0.5)
    seconds = [
        float(str(found[f"gen_ai.latency.{name}"])) for name in ("time_in_queue", "time_to_first_token", "e2e")
    ]
    assert 0 <= seconds[0] <= seconds[1] <= seconds[2]
    assert span.start_time is not None
    assert span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(seconds[2], abs=1e-6)


def test_a_request_that_fails_is_a_span_with_an_error() -> None:
    spans = InMemorySpanExporter()
    with served(executor=Failing()) as server:
        server.serving.traces = Traces("tiny", SimpleSpanProcessor(spans))
        ask(server)
        wait_until(spans.get_finished_spans)
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert "the device fell over" in str(span.status.description)


def test_spans_are_posted_to_the_collector() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Collector) as collector, served() as server:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        traces = Traces.sent_to(f"http://127.0.0.1:{collector.server_port}/v1/traces", "tiny")
        server.serving.traces = traces
        ask(server)
        traces.close()
        collector.shutdown()
    (span,) = ExportTraceServiceRequest.FromString(received[0]).resource_spans[0].scope_spans[0].spans
    assert span.name == "llm_request"


def test_what_is_missing_or_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"server\.otlp_endpoint=http://x: needs .* pip install 'opentelemetry"):
        Traces.sent_to("http://x", "tiny")
    with pytest.raises(ConfigError, match="must be a URL, such as http://"):
        ServerConfig(otlp_endpoint="localhost:4318")
