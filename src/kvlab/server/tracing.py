"""The recorder's other half, a process of its own: looks at what was said, and writes the trace.

It reads exchanges from its standard input (marshal, from the process that started it) until that is closed, and
prints how far it is after each. So hashing takes no time from the traffic, and of a recorder that is killed it
writes what has ended.
"""

from __future__ import annotations

import http.client
import json
import marshal
import os
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from kvlab.errors import KvlabError, shown
from kvlab.workloads.prompt_blocks import BlockHasher, Encode, text_encoder
from kvlab.workloads.trace_format import Header, TracedRequest, file_mode, header_line

BLOCK_TOKENS = 16
#: tokenizer=upstream: the server that is recorded makes tokens of texts, by its /tokenize.
UPSTREAM = "upstream"


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What is written, and where. `key` is what hashes are keyed with, `tokenizer` a folder, `upstream` or None,
    `text` whether prompts and outputs are kept.
    """

    path: str
    key: bytes
    tokenizer: str | None
    upstream: str
    started: float | None = None  # when the recorder's time was 0, in seconds since 1970
    text: bool = False


@dataclass(slots=True)
class Exchange:
    """A request and its answer. `parts` are pieces of the answer, and seconds after the request came."""

    path: str
    body: bytes
    arrival_s: float
    authorization: str | None = None  # for /tokenize; never written
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    status: int = 0
    is_whole: bool = False  # the answer came to its end

    def frame(self) -> bytes:
        """It, for the other process."""
        return marshal.dumps(astuple(self))


@dataclass(slots=True)
class Progress:
    """How far a trace is: exchanges looked at, requests written and lost, and why the last one was."""

    seen: int = 0
    written: int = 0
    lost: int = 0
    error: str = ""


class TraceFile:
    """A trace that grows: each line is there for good when it is written. It is opened when there is something to
    write, and again after a failure.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._path, self._head = path, header_line(header)
        self._mode = file_mode(header)
        self._file: IO[str] | None = None

    def write(self, request: TracedRequest) -> None:
        """Add a line. Raises OSError."""
        try:
            if self._file is None:
                self._file = self._opened()
            self._file.write(request.line() + "\n")
            self._file.flush()
        except OSError:
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
            self._file = None
            raise

    def _opened(self) -> IO[str]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch(self._mode)
        file = self._path.open("a", encoding="utf-8")
        # Behind a failure there may be half a line.
        file.write("\n" if self._path.stat().st_size else self._head + "\n")
        return file


class Tracer:
    """Writes those exchanges that are requests with an answer."""

    def __init__(self, settings: TraceSettings) -> None:
        self._settings, self.progress = settings, Progress()
        self._hasher = BlockHasher(settings.key, BLOCK_TOKENS)
        self._by_upstream = settings.tokenizer == UPSTREAM
        self._encode = None if self._by_upstream else text_encoder(settings.tokenizer)
        unknown = () if settings.tokenizer else ("tokens",)
        header = Header(
            BLOCK_TOKENS,
            self._hasher.key_id,
            settings.tokenizer,
            source="record",
            unknown=unknown,
            order="end",
            started=settings.started,
            text=settings.text,
        )
        self._file = TraceFile(Path(settings.path), header)

    def take(self, exchange: Exchange) -> None:
        """Look at an exchange. Nothing that a client or a server sends ends it."""
        self.progress.seen += 1
        try:
            request = self._traced(exchange)
            if request is None:
                return
            self._file.write(request)
            self.progress.written, self.progress.error = self.progress.written + 1, ""
        except Exception as error:
            self.progress.lost += 1
            reason = error.strerror if isinstance(error, OSError) else None
            self.progress.error = reason or f"{type(error).__name__}: {shown(error)}"

    def _traced(self, exchange: Exchange) -> TracedRequest | None:
        """The exchange as a line of the trace; None: it was refused, or is no request."""
        if exchange.status != 200:
            return None
        asked = json.loads(exchange.body)
        prompt = asked.get("messages", asked.get("prompt"))
        if not prompt:
            return None
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            tokens, hashes = len(prompt), self._hasher.tokens(prompt)
        else:
            tokens, hashes = self._hasher.prompt(prompt, self._encoder(exchange, asked))
        said = _said(exchange)
        times = said.times_s
        request = TracedRequest(
            tokens,
            round(exchange.arrival_s, 6),
            said.output_tokens,
            hashes,
            said.finish_reason if exchange.is_whole else "abort",
            max_tokens=asked.get("max_completion_tokens", asked.get("max_tokens")),
            temperature=asked.get("temperature"),
            cached_tokens=said.cached_tokens,
            ttft_ms=round(1000 * times[0], 3) if times else None,
            e2el_ms=round(1000 * exchange.parts[-1][0], 3) if exchange.parts else None,
        )
        if not self._settings.text:
            return request
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        return replace(request, prompt=text, output="".join(said.texts) or None)

    def _encoder(self, exchange: Exchange, asked: dict[str, Any]) -> Encode | None:
        if not self._by_upstream:
            return self._encode
        headers = {"Content-Type": "application/json"}
        if exchange.authorization:
            headers["Authorization"] = exchange.authorization
        url = f"{self._settings.upstream}/tokenize"
        request = urllib.request.Request(url, json.dumps(to_tokenize(asked)).encode(), headers)

        def encode(prompt: Any) -> Sequence[int]:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    tokens: list[int] = json.load(answer)["tokens"]
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                raise KvlabError(f"the upstream's /tokenize: {shown(error)}") from error
            return tokens

        return encode


def to_tokenize(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a call of /tokenize that asks for the tokens of a request's prompt."""
    return {name: asked[name] for name in ("model", "prompt", "messages", "tools") if name in asked}


@dataclass(slots=True)
class _Said:
    """What an answer says of itself. `times_s`: of its chunks that have a token; of a whole answer none."""

    output_tokens: int | None = None
    finish_reason: str | None = None
    cached_tokens: int | None = None
    times_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # of the first choice

    def take(self, body: dict[str, Any]) -> bool:
        """Take an answer, or a chunk; whether it has a choice."""
        usage = body.get("usage") or {}
        self.output_tokens = usage.get("completion_tokens", self.output_tokens)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        self.cached_tokens = self.cached_tokens if cached is None else cached
        choices = body.get("choices") or []
        for choice in choices:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            said = choice.get("delta") or choice.get("message") or {}
            text = choice.get("text") or said.get("content")
            if isinstance(text, str) and not choice.get("index"):
                self.texts.append(text)
        return bool(choices)


def _said(exchange: Exchange) -> _Said:
    said, held = _Said(), b""
    if b"data:" not in b"".join(part for _, part in exchange.parts[:2])[:4096]:
        with suppress(ValueError, AttributeError):  # compressed, cut, or no answer at all
            said.take(json.loads(b"".join(part for _, part in exchange.parts)))
        return said
    for at_s, part in exchange.parts:
        *events, held = (held + part).split(b"\n\n")
        for event in events:
            data = event.strip().removeprefix(b"data:").strip()
            with suppress(ValueError, AttributeError):  # [DONE], and comments
                if said.take(json.loads(data)):
                    said.times_s.append(at_s)
    if said.output_tokens is None:
        said.output_tokens = len(said.times_s)  # a chunk for each, as far as anybody can tell
    return said


def main() -> None:
    """Write what comes on standard input, until it ends."""
    os.nice(10)  # traffic goes first
    if sys.platform == "linux":  # and is not interrupted
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    source = sys.stdin.buffer
    tracer = Tracer(TraceSettings(*marshal.load(source)))
    while True:
        try:
            exchange = Exchange(*marshal.load(source))
        except EOFError:
            return
        tracer.take(exchange)
        with suppress(BrokenPipeError):  # the recorder was killed
            print(json.dumps(astuple(tracer.progress)), flush=True)


if __name__ == "__main__":
    main()
