"""kvlab's trace format: recorded requests as JSON lines or Parquet (docs/reference/trace.md).

The first line is a header, every other one a request. Prompts are known by hashes of their blocks. Each hash covers
all blocks before it, and is keyed with a secret of who recorded: prompts that begin alike have hashes that begin
alike, and nobody without the secret can find out with which text. Text itself is there only if a recorder was told
to keep it, and then the header says so.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from kvlab.core import MAX_WHOLE
from kvlab.errors import WorkloadError, shown
from kvlab.workloads.lines import json_object, read_lines
from kvlab.workloads.prompts import MAX_PROMPT_TOKENS
from kvlab.workloads.traces import Place, are_ids

VERSION = 1
MARK = "kvlab_trace"
PARQUET = ".parquet"
RECORDED = "record"  # the source of what kvlab record wrote
_as_json = json.JSONEncoder(separators=(",", ":")).encode
#: What a source may not tell, and what follows from it.
UNKNOWN = {
    "times": "no arrival times: set workload.arrival and workload.rate",
    "outputs": "no output lengths: they are drawn from workload.output_len",
    "prefixes": "nothing of what prompts have in common: each gets one of its own, and no hit rate is known",
    "tokens": "no numbers of prompt tokens: they are estimated from the text, four bytes a token",
}


@dataclass(frozen=True, slots=True)
class Header:
    """The first line. `unknown`: what the source does not tell, of `UNKNOWN`."""

    block_tokens: int = 16  # of the prompt that one hash stands for
    key_id: str | None = None  # which secret: traces with the same one can be compared
    tokenizer: str | None = None
    source: str | None = None  # the format that it was made of
    unknown: tuple[str, ...] = ()
    order: str = "arrival"  # of its lines, or `end`, as a recorder writes them
    started: float | None = None  # when its time was 0, in seconds since 1970
    text: bool = False  # whether requests have their prompt and output as text
    file_id: str | None = None  # which file it was made of: a digest of its path


@dataclass(slots=True)  # not frozen: millions are made
class TracedRequest:
    """One request. What the server did has the names of requests.parquet; None: not known."""

    prompt_tokens: int
    arrival_s: float | None = None  # after the first
    output_tokens: int | None = None
    hashes: Sequence[int] | None = None  # one for each block of the prompt, the last of which may be a part of one
    finish_reason: str | None = None
    session: str | None = None  # the conversation that it is part of
    max_tokens: int | None = None
    temperature: float | None = None
    cached_tokens: int | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    e2el_ms: float | None = None
    itl_ms: Sequence[float] | None = field(default=None)  # between its tokens
    prompt: str | None = None  # its text; of messages the JSON of the client
    output: str | None = None  # its text

    def line(self) -> str:
        """It as a line of a file."""
        columns = {name: value for name, value in zip(_FIELDS, _values(self), strict=True) if value is not None}
        if self.hashes is not None:
            columns["hashes"] = [f"{block_hash:016x}" for block_hash in self.hashes]
        return _as_json(columns)

    def check(self, block_tokens: int, *, least: int = 1) -> None:
        """Raises ValueError for what a trace cannot hold, as prompts below `least` tokens: files hold anything."""
        if type(self.prompt_tokens) is not int or not least <= self.prompt_tokens <= MAX_PROMPT_TOKENS:
            raise ValueError(f"a prompt of {shown(self.prompt_tokens, repr)} tokens")
        for name in _WHOLE:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value <= MAX_WHOLE):
                raise ValueError(f"{name} is {shown(value, repr)}, not a whole number")
        for name in _SECONDS:
            value = getattr(self, name)
            if value is not None and (type(value) not in (int, float) or not abs(value) < 2**53):
                raise ValueError(f"{name} is {shown(value, repr)}, not a number")
        for name in ("finish_reason", "session", *_TEXT):
            if not isinstance(value := getattr(self, name), str | None):
                raise ValueError(f"{name} is {shown(value, repr)}, not text")
        if self.hashes is not None:
            blocks = -(-self.prompt_tokens // block_tokens)
            if not are_ids(self.hashes) or len(self.hashes) != blocks:
                raise ValueError(f"expected {blocks} hashes of 64 bits, one for each {block_tokens} tokens")


_WHOLE = ("output_tokens", "max_tokens", "cached_tokens")
_SECONDS = ("arrival_s", "temperature", "queue_ms", "ttft_ms", "e2el_ms")
_TEXT = ("prompt", "output")
_FIELDS = [column.name for column in fields(TracedRequest)]
_values = attrgetter(*_FIELDS)
_HEADER = [column.name for column in fields(Header)]
_HEADER_TYPES: dict[str, Any] = {"block_tokens": int, "unknown": list, "started": int | float | None, "text": bool}


def header_line(header: Header) -> str:
    """It as a line of a file."""
    default = Header()
    changed = {name: value for name in _HEADER if (value := getattr(header, name)) != getattr(default, name)}
    return json.dumps({MARK: VERSION, "block_tokens": header.block_tokens} | changed)


def file_mode(header: Header) -> int:
    """The mode of a new file: one with text is for its owner alone."""
    return 0o600 if header.text else 0o666


def write_trace(path: Path, header: Header, requests: Iterable[TracedRequest]) -> int:
    """Write a trace, compressed where the name ends in .gz, and as Parquet where it ends in .parquet; how many
    requests. The file is there when it is whole. Raises WorkloadError where it cannot be written.
    """
    count, is_packed = 0, path.suffix == ".gz"
    with whole(path) as partial:
        partial.touch(file_mode(header))
        if path.suffix == PARQUET:
            from kvlab.workloads.trace_parquet import write_rows  # this late: few have such traces

            rows = (dict(zip(_FIELDS, _values(request), strict=True)) for request in requests)
            return write_rows(partial, header_line(header), fields(TracedRequest), rows)
        with gzip.open(partial, "wt", 5) if is_packed else partial.open("w", encoding="utf-8") as file:
            file.write(header_line(header) + "\n")
            for request in requests:
                file.write(request.line() + "\n")
                count += 1
    return count


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give a path to write to, which takes the place of `path` when it is written. Raises WorkloadError where it
    cannot be.
    """
    partial = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)  # of a process that was killed: its mode would stay
        yield partial
        partial.replace(path)
    except OSError as error:
        raise WorkloadError(f"{shown(str(path))}: cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def read_header(path: str, key: str = "workload.path") -> Header:
    """The header of a trace, a value of the setting `key`. Raises WorkloadError for a file that is none."""
    if is_parquet(path):
        from kvlab.workloads.trace_parquet import read_first_line

        return _header(Place(path, 1), read_first_line(path))
    for number, line in read_lines(path, key):
        return _header(Place(path, number), line)
    raise WorkloadError(f"{key}={shown(path)}: is empty; expected a trace of kvlab, as kvlab import makes")


def read_trace(path: str, *, text: bool = False) -> Iterator[tuple[Place, TracedRequest]]:
    """The requests of a trace, with their text if it is asked for. A last line that is cut, as a recorder that was
    killed leaves it, is left out.

    Raises WorkloadError for anything else that is wrong, with its line.
    """
    header = read_header(path)
    names = [name for name in _FIELDS if text or name not in _TEXT]
    requests = _read(path, header.block_tokens, names)
    yield from sorted(requests, key=lambda pair: pair[1].arrival_s or 0.0) if header.order == "end" else requests


def is_parquet(path: str) -> bool:
    """Whether a file is one, by how it begins; False where it cannot be read."""
    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read(4) == b"PAR1"
    except (OSError, ValueError, RuntimeError):  # as `read_lines`, which says why
        return False


def is_trace(path: str, head: str) -> bool:
    """Whether a file that begins with `head` is a trace of kvlab, of whatever version. Raises WorkloadError for
    Parquet that cannot be read.
    """
    if is_parquet(path):
        from kvlab.workloads.trace_parquet import read_first_line

        return bool(read_first_line(path))
    return head.startswith(f'{{"{MARK}"')


def _read(path: str, block_tokens: int, names: Sequence[str]) -> Iterator[tuple[Place, TracedRequest]]:
    part = "line"
    if is_parquet(path):
        from kvlab.workloads.trace_parquet import read_rows

        rows, part = read_rows(path, names), "row"
    else:
        rows = _json_rows(path, names)
    for number, row in rows:
        place, request = Place(path, number, part), TracedRequest(**row)
        try:
            request.check(block_tokens)
        except ValueError as error:
            raise place.error(f"{error}; expected a request of a trace") from error
        yield place, request


def _json_rows(path: str, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in islice(read_lines(path), 1, None):
        place = Place(path, number)
        try:
            row = json_object(line)
        except ValueError as error:
            if not line.endswith(b"\n"):
                return
            raise place.error(f"{error}; expected a JSON object with a request") from error
        try:
            if row.get("hashes") is not None:
                row["hashes"] = tuple(int(digits, 16) for digits in row["hashes"])
        except (TypeError, ValueError) as error:
            raise place.error("expected a list of 16 hexadecimal digits for each block", "hashes") from error
        yield number, {name: row.get(name) for name in names}


def _header(place: Place, line: bytes) -> Header:
    try:
        content = json_object(line)
    except ValueError:
        content = {}
    version = content.pop(MARK, None)
    if version != VERSION:
        what = (
            f"is of version {shown(version)}, and this kvlab reads {VERSION}" if version else "is no trace of kvlab"
        )
        raise place.error(f"{what}; kvlab import FILE makes one of other formats")
    block_tokens = place.tokens(content.get("block_tokens", 16), "block_tokens", most=MAX_WHOLE)
    values: dict[str, Any] = {name: value for name, value in content.items() if name in _HEADER}
    values |= {"block_tokens": block_tokens, "unknown": values.get("unknown", [])}
    for name, value in values.items():
        if not isinstance(value, _HEADER_TYPES.get(name, str | None)):
            raise place.error(f"{shown(value, repr)}; expected the header of a trace", name)
    return Header(**values | {"unknown": tuple(map(str, values["unknown"]))})
