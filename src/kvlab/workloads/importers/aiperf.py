"""Records of AIPerf, which have what the server did too."""

from collections.abc import Iterator
from typing import Any, ClassVar

from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import JsonLinesImporter
from kvlab.workloads.trace_format import TracedRequest
from kvlab.workloads.traces import Place


@IMPORTERS.register("aiperf")
class AIPerfImporter(JsonLinesImporter):
    """profile_export.jsonl; requests that failed, were cancelled, and of the warm-up, are left out."""

    what: ClassVar[str] = "records of AIPerf"
    marks = ('"request_start_ns"',)
    expected = "AIPerf's profile_export.jsonl"
    unknown: ClassVar[tuple[str, ...]] = ("prefixes",)
    in_order = False

    def of_line(self, place: Place, row: dict[str, Any]) -> Iterator[TracedRequest]:
        about, metrics = row["metadata"], row["metrics"]
        if about.get("benchmark_phase") == "warmup" or about.get("was_cancelled") or row.get("error"):
            return
        yield TracedRequest(
            metrics["input_sequence_length"]["value"],
            about["request_start_ns"] * 1e-9,
            metrics["output_sequence_length"]["value"],
            session=about.get("conversation_id"),
            cached_tokens=_value(metrics, "usage_prompt_cache_read_tokens"),
            ttft_ms=_value(metrics, "time_to_first_token"),
            e2el_ms=_value(metrics, "request_latency"),
            itl_ms=_value(metrics, "inter_chunk_latency"),
        )


def _value(metrics: dict[str, Any], name: str) -> Any:
    return metrics[name]["value"] if name in metrics else None
