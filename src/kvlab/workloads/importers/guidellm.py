"""Reports of GuideLLM, which have what the server did too."""

from collections.abc import Iterator
from typing import Any, ClassVar

from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import DocumentImporter
from kvlab.workloads.trace_format import TracedRequest


@IMPORTERS.register("guidellm")
class GuideLLMImporter(DocumentImporter):
    """benchmarks.json: the requests that succeeded, of all its benchmarks."""

    what: ClassVar[str] = "a report of GuideLLM"
    begins, marks = "{", ('"guidellm_version"',)
    expected = "a report of GuideLLM with its requests"
    unknown: ClassVar[tuple[str, ...]] = ("prefixes",)
    in_order = False

    def of_document(self, document: Any) -> Iterator[TracedRequest]:
        rows = [row for benchmark in document["benchmarks"] for row in benchmark["requests"]["successful"]]
        if not rows:
            raise self.error("has no request that succeeded; a report keeps them if it is to")
        yield from map(_request, rows)


def _request(row: dict[str, Any]) -> TracedRequest:
    latency = row.get("request_latency")
    return TracedRequest(
        row["prompt_tokens"],
        row["request_start_time"],
        row["output_tokens"],
        cached_tokens=row.get("cached_tokens"),
        ttft_ms=row.get("time_to_first_token_ms"),
        e2el_ms=None if latency is None else 1000 * latency,
    )
