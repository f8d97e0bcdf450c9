"""OpenTelemetry spans of requests, as vLLM and SGLang trace them: OTLP in JSON, as a collector writes it to a file.

Attributes: OpenTelemetry's semantic conventions for generative AI, and the older names that the engines use.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import JsonLinesImporter
from kvlab.workloads.lines import is_indented
from kvlab.workloads.trace_format import TracedRequest
from kvlab.workloads.traces import Place

_PROMPT = ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens")
_OUTPUT = ("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens")
_CACHED = ("gen_ai.usage.cached_tokens", "gen_ai.usage.cache_read.input_tokens")


@IMPORTERS.register("otel")
class OTelImporter(JsonLinesImporter):
    """Spans with prompt tokens are requests; others, and lines of metrics and logs, are left out. So are spans that
    others with prompt tokens are below, as those of a client and of an agent: the tokens are the same ones.
    """

    what: ClassVar[str] = "OpenTelemetry spans of requests"
    begins, marks = "{", ('"resourceSpans"',)
    expected = "spans in OTLP's JSON, line by line"
    unknown: ClassVar[tuple[str, ...]] = ("prefixes",)
    in_order = False

    @classmethod
    def recognises(cls, head: str) -> bool:
        """Also where a line is not a whole object."""
        return super().recognises(head.replace("\n", " ") if is_indented(head) else head)

    def requests(self) -> Iterator[TracedRequest]:
        """See Importer."""
        self._parents: dict[Any, Any] = {}  # of all spans
        self._spans: list[tuple[Any, Place]] = []  # of the requests
        requests = list(super().requests())
        above: set[Any] = set()
        for span, _ in self._spans:
            while (span := self._parents.get(span)) is not None and span not in above:
                above.add(span)
        for (span, place), request in zip(self._spans, requests, strict=True):
            if span not in above:
                self.place = place
                yield request

    def of_line(self, place: Place, row: dict[str, Any]) -> Iterator[TracedRequest]:
        for resource in row.get("resourceSpans", []):
            for scope in resource.get("scopeSpans", []):
                for span in scope.get("spans", []):
                    own, parent = ((span.get("traceId"), span.get(name)) for name in ("spanId", "parentSpanId"))
                    self._parents[own] = parent if parent[1] else None
                    if (request := _request(span)) is not None:
                        self._spans.append((own, place))
                        yield request


def _request(span: dict[str, Any]) -> TracedRequest | None:
    attributes = {attribute["key"]: _value(attribute["value"]) for attribute in span.get("attributes", [])}

    def first(names: tuple[str, ...]) -> Any:
        return next((attributes[name] for name in names if name in attributes), None)

    def ms(name: str) -> float | None:
        seconds = attributes.get(f"gen_ai.latency.{name}")
        return None if seconds is None else 1000 * seconds

    prompt, start = first(_PROMPT), int(span["startTimeUnixNano"])
    if not prompt or attributes.get("gen_ai.operation.name") == "embeddings":
        return None
    return TracedRequest(
        prompt,
        start * 1e-9,
        first(_OUTPUT),
        session=attributes.get("gen_ai.conversation.id"),
        max_tokens=attributes.get("gen_ai.request.max_tokens"),
        temperature=attributes.get("gen_ai.request.temperature"),
        cached_tokens=first(_CACHED),
        queue_ms=ms("time_in_queue"),
        ttft_ms=ms("time_to_first_token"),
        e2el_ms=ms("e2e") or (int(span["endTimeUnixNano"]) - start) * 1e-6,
    )


def _value(value: dict[str, Any]) -> Any:
    """Of OTLP's AnyValue, whose whole numbers are strings in JSON, or doubles of some exporters; None: empty."""
    if not value:
        return None
    ((kind, content),) = value.items()
    is_whole = kind == "intValue" or (isinstance(content, float) and content.is_integer())
    return int(content) if is_whole else content
