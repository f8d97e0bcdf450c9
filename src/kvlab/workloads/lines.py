"""The lines of a file of requests: numbered, decoded, and as JSON objects."""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvlab.errors import WorkloadError, shown

MAX_LINE_BYTES = 64 * 2**20  # room for as many token ids as the longest prompt has
MAX_DOCUMENT_BYTES = 2 << 30  # of a file that is one JSON value
_HEAD_BYTES = 64 << 10
_NO_SPACE = re.compile(r"\S")
_INDENTED = re.compile(r'\s*\{(\s*"[^"\\]*"\s*:\s*[\[{])?[ \t]*\r?\n')
_GZIP = b"\x1f\x8b"  # how its files begin
csv.field_size_limit(MAX_LINE_BYTES)  # of all, since Python has no other; its own is 128 KiB
_PACKED = {
    b"PK\x03\x04": "a ZIP archive, or a workbook",
    b"\xfd7zXZ": "packed by xz",
    b"\x28\xb5\x2f\xfd": "packed by zstd",
    b"BZh": "packed by bzip2",
}


def read_lines(name: str, key: str = "workload.path") -> Iterator[tuple[int, bytes]]:
    """The lines of a file that hold something, with their numbers from 1 on; one that is too long is cut. A file
    that gzip compressed is read as what it was made of.

    Raises WorkloadError where the file cannot be read, which names the setting that it was `key` of.
    """
    try:
        path = Path(name).expanduser()
        if not path.is_file() and path.exists() and not path.is_dir():
            raise OSError(0, "it is a pipe or a device, not a file")  # to open one may wait for ever
        file = path.open("rb")
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name; ~ of a user that there is not
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise WorkloadError(f"{key}={shown(name)}: cannot be read: {reason}") from error
    with file:
        is_packed, number = file.read(len(_GZIP)) == _GZIP, 0
        file.seek(0)
        lines: gzip.GzipFile | io.BufferedReader = gzip.GzipFile(fileobj=file) if is_packed else file
        while True:
            try:
                line = lines.readline(MAX_LINE_BYTES + 1)
            except (EOFError, OSError, zlib.error) as error:
                text = f"line {number + 1}: cannot be read: {error}"
                raise WorkloadError(f"{shown(name)}, {text}{'; was it cut off?' if is_packed else ''}") from error
            if not line:
                return
            number += 1
            line = line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"")
            if line.strip():
                yield number, line


def read_head(name: str) -> str:
    """How a file begins, as text, whatever is in it. Raises WorkloadError where it cannot be read."""
    try:
        with open(name, "rb") as file:
            data = file.read(_HEAD_BYTES)
        if data.startswith(_GZIP):
            with gzip.open(name) as unpacked:
                data = unpacked.read(_HEAD_BYTES)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise WorkloadError(f"{shown(name)}: cannot be read: {reason}") from error
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise WorkloadError(f"{shown(name)}: is UTF-16 text; save it as UTF-8")
    for begin, kind in _PACKED.items():
        if data.startswith(begin):
            raise WorkloadError(
                f"{shown(name)}: is {kind}; unpack it, or save it as CSV; of packed files gzip is read"
            )
    return data.removeprefix(codecs.BOM_UTF8).decode(errors="replace")


def read_document(name: str) -> Any:
    """What a file holds that is one JSON value, gzip compressed or not. Raises WorkloadError."""
    with _reading(name) as data:
        return json.loads(data)


def is_indented(head: str) -> bool:
    """Whether a file that begins like this has JSON objects of several lines each, as jq writes them."""
    return _INDENTED.match(head) is not None


def read_documents(name: str) -> Iterator[Any]:
    """The JSON values that a file holds behind each other, over any number of lines. Raises WorkloadError."""
    with _reading(name) as data:
        text, at, decoder = data.decode("utf-8-sig"), 0, json.JSONDecoder()
        while begin := _NO_SPACE.search(text, at):
            value, at = decoder.raw_decode(text, begin.start())
            yield value


@contextmanager
def _reading(name: str) -> Iterator[bytes]:
    """What a file holds, unpacked. Raises WorkloadError for what cannot be read, and for what the block raises."""
    try:
        path = Path(name)
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise WorkloadError(f"{shown(name)}: has more than {MAX_DOCUMENT_BYTES >> 30} GiB")
        data = path.read_bytes()
        yield gzip.decompress(data) if data.startswith(_GZIP) else data
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise WorkloadError(f"{shown(name)}: cannot be read: {error}") from error


def decoded(line: bytes) -> str:
    """The text of a line. Raises ValueError, saying what is wrong with it."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"is longer than {MAX_LINE_BYTES // 2**20} MiB")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start + 1})") from error


def csv_cells(line: bytes, delimiter: str = ",") -> list[str]:
    """The cells of a line of a CSV file, without spaces around them. Raises ValueError, saying what is wrong."""
    try:
        return [cell.strip() for cell in next(csv.reader([decoded(line)], delimiter=delimiter, strict=True))]
    except csv.Error as error:
        is_cut = str(error) == "unexpected end of data"
        raise ValueError("a cell in quotes does not end in this line" if is_cut else str(error)) from error


def json_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises ValueError, saying what is wrong, for anything else."""
    text = decoded(line).rstrip()  # or what ends in a string is told of its line break
    try:
        row = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deep") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg.removesuffix(' at')} (character {error.colno})") from error
    except ValueError as error:
        if "integer string conversion" in str(error):  # Python's own limit
            raise ValueError("a number of thousands of digits") from error
        raise
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(name for name, _ in pairs if [key for key, _ in pairs].count(name) > 1)
        raise ValueError(f"field {shown(twice, repr)} is there twice")
    return row
