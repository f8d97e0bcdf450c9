"""The log of a vLLM server that logs its requests.

At level DEBUG a request has its prompt's tokens; answers are logged with --enable-log-outputs. Older versions have
the tokens at level INFO.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import ClassVar

from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import Importer
from kvlab.workloads.lines import read_lines
from kvlab.workloads.trace_format import TracedRequest

_TIME = re.compile(r"(?:INFO|DEBUG) (\d\d-\d\d \d\d:\d\d:\d\d)")
_ABOUT = re.compile(
    r"(Received request|Request|Generated response) ([^\s:]+?)(?:-\d{1,4})?(?: \([a-z ]+\))?(?: details)?: "
)
_TOKENS = re.compile(r"(?<!output_)\b(?:prompt_)?token_ids: \[([\d, ]*)\]")
_OUTPUT = re.compile(r"output_token_ids: \[([\d, ]*)\]")
_MOST = re.compile(r"\bmax_tokens=(\d+)")
_TEMPERATURE = re.compile(r"\btemperature=([\d.]+)")
_FINISH = re.compile(r"finish_reason: (\w+)$")


@dataclass(slots=True)
class _Found:
    """What lines say of a request."""

    arrival_s: float
    tokens: list[int] = field(default_factory=list)
    output: int | None = None
    finish: str | None = None
    most: int | None = None
    temperature: float | None = None


@IMPORTERS.register("vllm_log")
class VllmLogImporter(Importer):
    """Times are whole seconds, of a year that the log does not say."""

    what: ClassVar[str] = "a log of vLLM"
    in_order = False

    @classmethod
    def recognises(cls, head: str) -> bool:
        return _TIME.search(head) is not None and ("Received request " in head or "vLLM" in head)

    def requests(self) -> Iterator[TracedRequest]:
        requests = {name: request for name, request in self._read().items() if request.tokens}
        if not requests:
            text = "has no tokens of prompts; log them with VLLM_LOGGING_LEVEL=DEBUG and --enable-log-requests"
            raise self.error(text)
        for request in requests.values():
            yield TracedRequest(
                len(request.tokens),
                request.arrival_s,
                request.output,
                self.options.hasher.tokens(request.tokens),
                request.finish,
                max_tokens=request.most,
                temperature=request.temperature,
            )

    def _read(self) -> dict[str, _Found]:
        """What is said of each request, by its id."""
        requests: dict[str, _Found] = {}
        for _, line in read_lines(self.options.path):
            text = line.decode(errors="replace").rstrip()
            about, at = _ABOUT.search(text), _TIME.search(text)
            if about is None or at is None:
                continue
            when = datetime.strptime(f"2000-{at[1]}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
            request = requests.setdefault(about[2], _Found(when))
            if about[1] == "Generated response":
                if tokens := _OUTPUT.search(text):
                    request.output = len(tokens[1].split(",")) if tokens[1] else 0
                if finish := _FINISH.search(text):
                    request.finish = finish[1]
                continue
            if tokens := _TOKENS.search(text):
                request.tokens = [int(token) for token in tokens[1].split(",")] if tokens[1] else []
            if most := _MOST.search(text):
                request.most = int(most[1])
            if temperature := _TEMPERATURE.search(text):
                request.temperature = float(temperature[1])
        return requests
