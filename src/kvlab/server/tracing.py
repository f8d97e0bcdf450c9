"""The recorder's other half, a process of its own: looks at what was said, and writes the trace.

It reads exchanges from its standard input (marshal, from the process that started it) until that is closed, and
prints how far it is after each. So hashing takes no time from the traffic, and of a recorder that is killed it
writes what has ended.
"""

import http.client
import json
import marshal
import os
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import IO, Any

from kvlab.errors import KvlabError, shown
from kvlab.server.said import LEFT, Choice, Exchange, said_of
from kvlab.workloads.prompt_blocks import BlockHasher, Encode, as_text, most_tokens, prompts_of, text_encoder
from kvlab.workloads.trace_format import RECORDED, Header, TracedRequest, file_mode, header_line

BLOCK_TOKENS = 16
#: tokenizer=upstream: the server that is recorded makes tokens of texts, by its /tokenize.
UPSTREAM = "upstream"
#: Fields of a request, beside its prompt, on which the prompt's tokens depend.
_RENDERING = (
    "model", "add_generation_prompt", "add_special_tokens", "chat_template_kwargs", "continue_final_message",
)  # fmt: skip


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
class Progress:
    """How far a trace is: exchanges looked at, requests written and lost, and why the last one of these was."""

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
        self._end: int | None = None  # of the last line that was written; None: none was tried

    def write(self, request: TracedRequest) -> None:
        """Add a line. Raises OSError."""
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.touch(self._mode)
                size = self._path.stat().st_size
                if self._end is not None and size > self._end:  # a part of the header or of a line
                    os.truncate(self._path, self._end)
                    size = self._end
                self._end = size
                file = self._file = self._path.open("a", encoding="utf-8")
                # Of a process that was killed there may be half a line.
                file.write("\n" if size else self._head + "\n")
            self._file.write(request.line() + "\n")
            self._file.flush()
            self._end = os.fstat(self._file.fileno()).st_size
        except OSError:
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
            self._file = None
            raise


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
            source=RECORDED,
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
            for request in self._traced(exchange):
                self._file.write(request)
                self.progress.written += 1
        except Exception as error:
            self.progress.lost += 1
            reason = error.strerror if isinstance(error, OSError) else None
            self.progress.error = reason or f"{type(error).__name__}: {shown(error)}"

    def _traced(self, exchange: Exchange) -> list[TracedRequest]:
        """The exchange as lines of the trace, one for each sample of each prompt; none where it was refused, or is
        no request.
        """
        if exchange.status not in (200, LEFT):
            return []
        asked = json.loads(exchange.body)
        prompts, said, requests = prompts_of(asked), said_of(exchange), list[TracedRequest]()
        samples = _whole(asked.get("n")) or 1
        most = _whole(most_tokens(asked))
        tokens = said.shares(most)
        for number, prompt in enumerate(prompts):
            length, hashes = self._hasher.prompt(prompt, self._encoder(exchange, asked))
            first = TracedRequest(
                length,
                round(exchange.arrival_s, 6),
                hashes=hashes,
                max_tokens=most,
                temperature=value if type(value := asked.get("temperature")) in (int, float) else None,
                e2el_ms=round(1000 * exchange.parts[-1][0], 3) if exchange.parts else None,
            )
            if self._settings.text:
                text = as_text(prompt["messages"]) if isinstance(prompt, dict) else as_text(prompt)
                first = replace(first, prompt=text)
            # A server that gave none, or not as many as were asked for, computed the prompt nevertheless.
            given = sorted(index for index in said.choices if index // samples == number)
            for index in given or [number * samples]:
                choice = said.choices.get(index) or Choice()
                request = replace(
                    first,
                    output_tokens=tokens.get(index),
                    finish_reason=choice.finish_reason if exchange.is_whole else "abort",
                    # Of several prompts the server says how many in all; samples share the prompt of the first.
                    cached_tokens=said.cached_tokens if not index and len(prompts) == 1 else None,
                    ttft_ms=round(1000 * choice.times_s[0], 3) if choice.times_s else None,
                    output="".join(choice.texts) or None if self._settings.text else None,
                )
                request.check(BLOCK_TOKENS)  # that what is written can be read
                requests.append(request)
        return requests

    def _encoder(self, exchange: Exchange, asked: dict[str, Any]) -> Encode | None:
        if not self._by_upstream:
            return self._encode
        headers = {"Content-Type": "application/json"}
        if exchange.authorization:
            headers["Authorization"] = exchange.authorization
        url = f"{self._settings.upstream}/tokenize"

        def encode(prompt: Any) -> Sequence[int]:
            request = urllib.request.Request(url, json.dumps(to_tokenize(asked, prompt)).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    tokens: list[int] = json.load(answer)["tokens"]
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                raise KvlabError(f"the upstream's /tokenize: {shown(error)}") from error
            return tokens

        return encode


def to_tokenize(asked: Mapping[str, Any], prompt: Any) -> dict[str, Any]:
    """The body of a call of /tokenize that asks for the tokens of a prompt of a request."""
    return {name: asked[name] for name in _RENDERING if name in asked} | (
        prompt if isinstance(prompt, dict) else {"prompt": prompt}
    )


def _whole(value: Any) -> int | None:
    """A number as servers take it, that 9.0 and "9" too; None: there is none, or it says no limit, as -1."""
    with suppress(TypeError, ValueError, OverflowError):
        return found if (found := int(value)) > 0 else None
    return None


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
