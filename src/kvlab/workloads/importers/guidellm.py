"""Reports of GuideLLM, which have what the server did too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from kvlab.errors import WorkloadError, shown
from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import Importer, mistake
from kvlab.workloads.lines import read_document
from kvlab.workloads.trace_format import TracedRequest


@IMPORTERS.register("guidellm")
class GuideLLMImporter(Importer):
    """benchmarks.json: the requests that succeeded, of all its benchmarks."""

    what: ClassVar[str] = "a report of GuideLLM"
    unknown: ClassVar[tuple[str, ...]] = ("prefixes",)

    @staticmethod
    def recognises(head: str) -> bool:
        return head.lstrip().startswith("{") and '"guidellm_version"' in head

    def requests(self) -> Iterator[TracedRequest]:
        path = self.options.path
        try:
            found = [row for each in read_document(path)["benchmarks"] for row in each["requests"]["successful"]]
            found.sort(key=lambda row: row["request_start_time"])
            requests = list(map(_request, found))
        except (KeyError, TypeError, AttributeError) as error:
            text = f"{mistake(error)}; expected a report of GuideLLM with its requests"
            raise WorkloadError(f"{shown(path)}: {text}") from error
        if not requests:
            raise WorkloadError(f"{shown(path)}: has no request that succeeded; a report keeps them if it is to")
        yield from requests


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
