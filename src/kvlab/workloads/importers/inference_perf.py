"""Reports of inference-perf, which have what the server did too."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar

from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import DocumentImporter
from kvlab.workloads.trace_format import TracedRequest


@IMPORTERS.register("inference_perf")
class InferencePerfImporter(DocumentImporter):
    """per_request_lifecycle_metrics.json; requests that failed are left out."""

    what: ClassVar[str] = "a report of inference-perf"
    begins, marks = "[", ('"start_time"', '"end_time"', '"info"')
    expected = "inference-perf's per_request_lifecycle_metrics.json"
    unknown: ClassVar[tuple[str, ...]] = ("prefixes",)
    in_order = False

    def of_document(self, document: Any) -> Iterator[TracedRequest]:
        yield from (_request(row) for row in document if not row.get("error"))


def _request(row: dict[str, Any]) -> TracedRequest:
    info, start = row["info"], row["start_time"]
    answer = info.get("response_metrics") or info  # of older versions
    usage = answer.get("server_usage") or {}
    counted = usage.get("completion_tokens")
    asked = (info.get("request_metrics") or {}).get("text") or info
    times = answer.get("output_token_times") or []
    return TracedRequest(
        asked["input_tokens"],
        start,
        answer["output_tokens"] if counted is None else counted,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        ttft_ms=1000 * (times[0] - start) if times else None,
        e2el_ms=1000 * (row["end_time"] - start),
        itl_ms=[1000 * (after - before) for before, after in pairwise(times)] or None,
    )
