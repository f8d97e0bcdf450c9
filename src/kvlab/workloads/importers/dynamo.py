"""Dynamo's request trace (schema dynamo.request.trace.v1), whose hashes are kept."""

from collections.abc import Iterator
from typing import Any, ClassVar

from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import ImportOptions, JsonLinesImporter
from kvlab.workloads.trace_format import TracedRequest
from kvlab.workloads.traces import Place

_SCHEMA = "dynamo.request.trace.v1"


@IMPORTERS.register("dynamo")
class DynamoImporter(JsonLinesImporter):
    """Records of requests that ended; those of tools and of payloads are left out. What follows a prompt's last
    whole block has no hash, and counts as its own.
    """

    what: ClassVar[str] = "Dynamo's request trace"
    marks = (f'"{_SCHEMA}"',)
    expected = f"a record of {_SCHEMA}"
    in_order = False

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        self._has_size = False

    def of_line(self, place: Place, row: dict[str, Any]) -> Iterator[TracedRequest]:
        if row.get("event_type") != "request_end" or not isinstance(row.get("request"), dict):
            return
        asked, about = row["request"], row.get("agent_context") or {}
        replay = asked.get("replay") or {}
        prompt = replay.get("input_length") or asked["input_tokens"]
        finish = (asked.get("finish_reason_metadata") or {}).get("finish_reason")
        yield TracedRequest(
            prompt,
            asked["request_received_ms"] / 1000,
            asked.get("output_tokens"),
            self._hashes(place, prompt, replay) if replay else None,
            finish,
            session=about.get("session_id"),
            cached_tokens=asked.get("cached_tokens"),
            queue_ms=asked.get("prefill_wait_time_ms"),
            ttft_ms=asked.get("ttft_ms"),
            e2el_ms=asked.get("total_time_ms"),
        )

    def _hashes(self, place: Place, prompt: int, replay: dict[str, Any]) -> list[int]:
        if not self._has_size:
            self.block_tokens, self._has_size = replay["trace_block_size"], True
        if replay["trace_block_size"] != self.block_tokens:
            size = f"{replay['trace_block_size']}, in lines before {self.block_tokens}"
            raise place.error(f"its blocks have {size}; import the records of one model", "trace_block_size")
        hashes: list[int] = replay["input_sequence_hashes"]
        missing = -(-prompt // self.block_tokens) - len(hashes)
        return hashes + self.options.hasher.text(b"%d" % place.line * 64)[:1] * missing
