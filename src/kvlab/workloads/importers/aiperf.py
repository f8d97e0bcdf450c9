"""Records of AIPerf, which have what the server did too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import Importer, mistake
from kvlab.workloads.lines import json_object, read_lines
from kvlab.workloads.trace_format import TracedRequest
from kvlab.workloads.traces import Place


@IMPORTERS.register("aiperf")
class AIPerfImporter(Importer):
    """profile_export.jsonl; requests that were cancelled, and of the warm-up, are left out."""

    what: ClassVar[str] = "records of AIPerf"
    unknown: ClassVar[tuple[str, ...]] = ("prefixes",)

    @staticmethod
    def recognises(head: str) -> bool:
        return '"request_start_ns"' in head.partition("\n")[0]

    def requests(self) -> Iterator[TracedRequest]:
        rows = sorted(self._rows(), key=lambda row: row.arrival_s or 0.0)  # they are written as they end
        yield from rows

    def _rows(self) -> Iterator[TracedRequest]:
        for number, line in read_lines(self.options.path):
            place = Place(self.options.path, number)
            try:
                row = json_object(line)
                about, metrics = row["metadata"], row["metrics"]
                if about.get("benchmark_phase") == "warmup" or about.get("was_cancelled"):
                    continue
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
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise place.error(f"{mistake(error)}; expected AIPerf's profile_export.jsonl") from error


def _value(metrics: dict[str, Any], name: str) -> Any:
    return metrics[name]["value"] if name in metrics else None
