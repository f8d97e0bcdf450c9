"""What a server of OpenAI's protocol said to a request, as a recorder saw it go by."""

import json
import zlib
from contextlib import suppress
from dataclasses import dataclass, field

#: The status of a request whose client left before it was answered, as nginx writes it.
LEFT = 499
_GZIP, _GZIP_BITS = b"\x1f\x8b", 31
_LARGEST = 64 << 20  # bytes of an answer that was compressed


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


@dataclass(slots=True)
class Choice:
    """One sample. `times_s`: of its chunks; of a whole answer none."""

    finish_reason: str | None = None
    times_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Said:
    """What an answer says of itself."""

    output_tokens: int | None = None  # of all choices; None: it does not say
    cached_tokens: int | None = None
    choices: dict[int, Choice] = field(default_factory=dict)  # by index

    def take(self, data: bytes, at_s: float | None = None) -> None:
        """Take an answer, or a chunk that came then. What is none, as [DONE], is passed over."""
        with suppress(ValueError, AttributeError, TypeError, RecursionError):
            body = json.loads(data)
            usage = body.get("usage") or {}
            self.output_tokens = usage.get("completion_tokens", self.output_tokens)
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            self.cached_tokens = self.cached_tokens if cached is None else cached
            for one in body.get("choices") or []:
                choice = self.choices.setdefault(one.get("index") or 0, Choice())
                choice.finish_reason = one.get("finish_reason") or choice.finish_reason
                said = one.get("delta") or one.get("message") or {}
                if isinstance(text := one.get("text") or said.get("content"), str):
                    choice.texts.append(text)
                if at_s is not None:
                    choice.times_s.append(at_s)

    def shares(self, most: int | None) -> dict[int, int | None]:
        """The output tokens of each choice, which may have `most`. Servers say how many all have together: those
        that ended by length have as many as they may, and of the others each as many as it had chunks, or as its
        text is long, of what all had.
        """
        chunks = {index: len(choice.times_s) for index, choice in self.choices.items()}
        if self.output_tokens is None:  # a chunk for each, as far as anybody can tell
            return {index: number or None for index, number in chunks.items()}
        if len(self.choices) < 2:
            return dict.fromkeys(self.choices or (0,), self.output_tokens)
        shares = dict[int, int | None]()
        if most is not None:
            cut = [index for index, choice in self.choices.items() if choice.finish_reason == "length"]
            shares |= dict.fromkeys(cut, most) if most * len(cut) <= self.output_tokens else {}
        texts = {index: len("".join(choice.texts)) for index, choice in self.choices.items()}
        sizes = chunks if any(chunks.values()) else texts
        weights = {index: size + 1 for index, size in sizes.items() if index not in shares}  # of no text the end
        total, before, given = self.output_tokens - (most or 0) * len(shares), 0, 0
        for index, weight in weights.items():
            before += weight
            until = round(total * before / sum(weights.values()))
            shares[index], given = until - given, until
        return shares


def said_of(exchange: Exchange) -> Said:
    """What the answer says: one JSON object, which gzip may have compressed, or events with one in each `data:`."""
    said = Said()
    begin = b"".join(part for _, part in exchange.parts[:2]).lstrip()
    if begin[:1] == b"{" or begin[:2] == _GZIP:
        whole = b"".join(part for _, part in exchange.parts)
        with suppress(zlib.error):  # cut
            whole = zlib.decompressobj(_GZIP_BITS).decompress(whole, _LARGEST) if begin[:2] == _GZIP else whole
        said.take(whole)
        return said
    held, has_data = b"", False
    for at_s, part in [*exchange.parts, *((at_s, b"\n") for at_s, _ in exchange.parts[-1:])]:
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                has_data = True
                said.take(line.removeprefix(b"data:"), at_s)
    if has_data and not said.choices and said.output_tokens is None:
        said.output_tokens = 0  # an error, or what broke before the first token
    return said
