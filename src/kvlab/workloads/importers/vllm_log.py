"""The log of a vLLM server that logs its requests.

At level DEBUG a request has its prompt's tokens; answers are logged with --enable-log-outputs. Older versions have
the tokens at level INFO.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import ClassVar

from kvlab.core import limits
from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import Importer
from kvlab.workloads.lines import read_lines
from kvlab.workloads.trace_format import TracedRequest
from kvlab.workloads.traces import Place

_HALF_A_YEAR_S = 183 * 86400  # of a leap year, as all years here are
_TIME = re.compile(r"(?:INFO|DEBUG) (\d\d-\d\d \d\d:\d\d:\d\d)")
_ABOUT = re.compile(
    r"(Received request|Request|Generated response) ([^\s:]+?)(?: \(streaming (?:delta|complete)\))?(?: details)?: "
)
_IDS = r"\[((?:\d+(?:, *\d+)*)?)\]"
_TOKENS = re.compile(rf"(?<!output_)\b(?:prompt_)?token_ids: {_IDS}")
_OUTPUT = re.compile(rf"output_token_ids: {_IDS}")
_SAMPLES = re.compile(r"\bSamplingParams\(n=(\d+)")
_OTHER = ("params: None", "params: Pooling")  # how calls of /tokenize and of pooling models go on
_MOST = re.compile(r"\bmax_tokens=(\d+)")
_TEMPERATURE = re.compile(r"\btemperature=(\d+(?:\.\d+)?(?:e[-+]?\d+)?)")
_FINISH = re.compile(r"finish_reason: (\w+)$")


@dataclass(slots=True)
class _Found:
    """What lines say of a request."""

    arrival_s: float
    tokens: list[int] = field(default_factory=list)
    samples: int = 1
    output: int | None = None  # tokens of all samples
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
        requests = [request for request in self._read().values() if request.tokens]
        if not requests:
            text = "has no tokens of prompts; log them with VLLM_LOGGING_LEVEL=DEBUG and --enable-log-requests"
            raise self.error(text)
        for request in requests:
            hashes = self.options.hasher.tokens(request.tokens)
            for number in range(request.samples):  # which the log does not tell apart
                yield TracedRequest(
                    len(request.tokens),
                    request.arrival_s,
                    None if request.output is None else (request.output + number) // request.samples,
                    hashes,
                    request.finish,
                    max_tokens=request.most,
                    temperature=request.temperature,
                )

    def _read(self) -> dict[str, _Found]:
        """What is said of each request, by its id."""
        requests: dict[str, _Found] = {}
        latest_s = years_s = 0.0
        for number, line in read_lines(self.options.path):
            text = line.decode(errors="replace").rstrip()
            about, at = _ABOUT.search(text), _TIME.search(text)
            if about is None or at is None:
                continue
            try:
                when = datetime.strptime(f"2000-{at[1]}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
            except ValueError as error:
                raise Place(self.options.path, number).error(f"{at[1]} is no date and time") from error
            if when + years_s < latest_s - _HALF_A_YEAR_S:
                years_s += 2 * _HALF_A_YEAR_S
            latest_s = when + years_s
            what, name = about.groups()
            if what == "Generated response":
                # A completion is logged by the id of its prompt, and its answer by that of the call.
                request = requests.get(name) or requests.get(f"{name}-0")
                if request is not None:
                    _answered(request, text)
            elif text.startswith(_OTHER, about.end()):
                requests.pop(name, None)
            else:
                _asked(requests.setdefault(name, _Found(latest_s)), text)
        return requests


def _asked(request: _Found, text: str) -> None:
    """Take what a line says of a request that came."""
    if tokens := _TOKENS.search(text):
        request.tokens = [int(token) for token in tokens[1].split(",")] if tokens[1] else []
    if samples := _SAMPLES.search(text):
        request.samples = min(max(int(samples[1]), 1), limits.MAX_SAMPLES)
    if most := _MOST.search(text):
        request.most = int(most[1])
    if temperature := _TEMPERATURE.search(text):
        request.temperature = float(temperature[1])


def _answered(request: _Found, text: str) -> None:
    """Take what a line says of an answer, or of the part of a stream; the last line of a stream has no tokens."""
    if tokens := _OUTPUT.search(text):
        request.output = (request.output or 0) + (len(tokens[1].split(",")) if tokens[1] else 0)
    finish = _FINISH.search(text)
    if finish and finish[1] not in ("None", "streaming_complete"):
        request.finish = finish[1]
