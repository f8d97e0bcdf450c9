"""A span for each request, sent by OpenTelemetry's protocol."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from kvlab.core import Request, RequestRecord
from kvlab.engine.protocol import FinishCallback
from kvlab.errors import ConfigError
from kvlab.extras import install_command

_TIMEOUT_S = 5  # for the collector to take a batch of spans


class Traces:
    """Gives spans of vLLM's name, with its attributes where they mean the same, to a processor."""

    def __init__(self, model: str, processor: SpanProcessor) -> None:
        self._model = model
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "kvlab"}))  # flushed at exit
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvlab.server")

    @classmethod
    def sent_to(cls, endpoint: str, model: str) -> Traces:
        """A thread posts them to a collector; the queue before it is bounded. Raises ConfigError."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            text = f"needs OpenTelemetry's exporter, which is not installed: {install_command('otel')}"
            raise ConfigError("server.otlp_endpoint", endpoint, text) from error
        return cls(model, BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_TIMEOUT_S)))

    def follow(
        self, requests: Sequence[Request], headers: Mapping[str, str], on_finish: FinishCallback
    ) -> FinishCallback:
        """What is to be given each sample's record: it calls `on_finish`, and ends a request's span with its last
        sample. The span's parent is the one that `headers` name.
        """
        parent = TraceContextTextMapPropagator().extract(headers)
        asked = {request.request_id: request for request in requests}
        ended: dict[str, list[RequestRecord]] = {name: [] for name in asked}

        def finish(record: RequestRecord) -> None:
            on_finish(record)
            request, records = asked[record.request_id], ended[record.request_id]
            records.append(record)
            if len(records) < request.sampling.n:
                return
            now = time.time_ns()
            seconds = max(sample.finished_s for sample in records) - record.arrival_s
            attributes = self._attributes(request, records)
            start = now - round(seconds * 1e9)
            span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, attributes, start_time=start)
            if record.error is not None:
                span.set_status(Status(StatusCode.ERROR, record.error))
            span.end(now)

        return finish

    def close(self) -> None:
        """Send what waits; no more comes."""
        self._provider.shutdown()

    def _attributes(self, request: Request, records: list[RequestRecord]) -> dict[str, AttributeValue]:
        records = sorted(records, key=lambda record: record.sample)
        first, sampling, arrival_s = records[0], request.sampling, records[0].arrival_s
        finished_s = max(record.finished_s for record in records)
        attributes: dict[str, AttributeValue] = {
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [record.finish_reason.value for record in records],
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.n": sampling.n,
            "gen_ai.usage.prompt_tokens": first.prompt_tokens,
            "gen_ai.usage.completion_tokens": sum(len(record.output_token_ids) for record in records),
            "gen_ai.latency.e2e": finished_s - arrival_s,
            "kvlab.cached_tokens": first.cached_tokens,
            "kvlab.preemptions": sum(record.preemptions for record in records),
        }
        scheduled_s, first_token_s = first.scheduled_s, first.first_token_s
        if scheduled_s is not None:
            attributes["gen_ai.latency.time_in_queue"] = scheduled_s - arrival_s
        if scheduled_s is not None and first_token_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = first_token_s - arrival_s
            attributes["gen_ai.latency.time_in_model_prefill"] = first_token_s - scheduled_s
            attributes["gen_ai.latency.time_in_model_decode"] = finished_s - first_token_s
            attributes["gen_ai.latency.time_in_model_inference"] = finished_s - scheduled_s
        return attributes
