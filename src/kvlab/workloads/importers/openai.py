"""Requests of OpenAI's API as JSON lines or a JSON list: bodies, or the lines of a batch file with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import JsonLinesImporter
from kvlab.workloads.importers.table import UNITS
from kvlab.workloads.trace_format import TracedRequest
from kvlab.workloads.traces import Place, moment

_TIMES = ("timestamp", "created", "created_at", "time")


@IMPORTERS.register("openai")
class OpenAIImporter(JsonLinesImporter):
    """Text is hashed and forgotten."""

    what: ClassVar[str] = "requests of OpenAI's API"
    expected = "a JSON object with a request of OpenAI's API"
    reads_text: ClassVar[bool] = True

    @classmethod
    def recognises(cls, head: str) -> bool:
        head = head.lstrip()
        seen = head if head.startswith("[") else head.partition("\n")[0]
        return seen.startswith(("{", "[")) and any(f'"{name}":' in seen for name in ("messages", "body", "prompt"))

    def of_line(self, place: Place, row: dict[str, Any]) -> Iterator[TracedRequest]:
        body = row.get("body", row)
        prompt = body.get("messages", body.get("prompt")) if isinstance(body, dict) else None
        if prompt is None:
            raise place.error("has neither messages nor a prompt; expected a request of OpenAI's API")
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            tokens, hashes = len(prompt), self.options.hasher.tokens(prompt)
        else:
            tokens, hashes = self.options.hasher.prompt(prompt, self.options.encode)
        usage = row.get("usage") or (row.get("response") or {}).get("usage") or {}
        most = body.get("max_completion_tokens", body.get("max_tokens"))
        session = row.get("session_id") or body.get("user")
        yield TracedRequest(
            tokens,
            self._arrival(place, row),
            usage.get("completion_tokens"),
            hashes,
            session=None if session is None else str(session),
            max_tokens=most,
            temperature=body.get("temperature"),
        )

    def _arrival(self, place: Place, row: dict[str, Any]) -> float | None:
        for name in _TIMES:
            if row.get(name) is not None:
                value = row[name]
                if isinstance(value, int | float):
                    return float(value) * UNITS[self.options.unit or "s"]
                return place.seconds(value, name, "a number, or a date and time", moment)
        return None
