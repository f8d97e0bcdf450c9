"""Requests from recorded traffic: lengths, times and what prompts have in common, no text.

A reader of a format yields rows; `trace_requests` makes requests of them. Whatever a file has wrong is named by
line and column, with what was expected there.
"""

import math
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvlab.config import WorkloadConfig
from kvlab.config.values import MOST_SECONDS
from kvlab.core import MAX_WHOLE, Request
from kvlab.errors import WorkloadError, shown
from kvlab.hashed_prompt import HashedPrompt
from kvlab.workloads.arrivals import arrival_times
from kvlab.workloads.lines import csv_cells, json_object, read_lines
from kvlab.workloads.prompts import MAX_PROMPT_TOKENS, make_request
from kvlab.workloads.sources import WORKLOAD_SOURCES

_JSON_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_TOKEN_COUNT = re.compile(r"\d{1,18}(\.0*)?", re.ASCII)
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+", re.ASCII)  # 1,833, as tables are written for people
_OF_A_WEB_SERVER = re.compile(r"\[?\d{2}/[A-Z][a-z]{2}/\d{4}:", re.ASCII)
_TOKENS = "a whole number of tokens, from {} to {}"
_NOTHING = "; kvlab import makes a trace without requests of 0 tokens"


class Columns(NamedTuple):
    """The columns of a CSV file: tokens of prompts and outputs, and the time, if there is one."""

    prompt: str
    output: str
    time: str | None = None

    @property
    def names(self) -> list[str]:
        """Those that a file of the format has."""
        return [name for name in (self.time, self.prompt, self.output) if name]


CSV_FORMATS = {
    "azure": Columns("ContextTokens", "GeneratedTokens", "TIMESTAMP"),
    "burstgpt": Columns("Request tokens", "Response tokens", "Timestamp"),
    "sharegpt_lengths": Columns("num_prefill_tokens", "num_decode_tokens"),
}


class Place(NamedTuple):
    """A line of a file, or a `part` of one without lines, as a row of Parquet."""

    path: str | None
    line: int
    part: str = "line"

    def error(self, reason: str, column: str | None = None) -> WorkloadError:
        """What is wrong with the line, or with one column of it."""
        where = f", column {shown(column)}" if column else ""
        return WorkloadError(f"{shown(self.path)}, {self.part} {self.line}{where}: {reason}")

    def tokens(self, value: object, column: str, *, least: int = 1, most: int, hint: str = "") -> int:
        """A number of tokens. Raises WorkloadError for anything else, for 0 with a `hint`."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # pandas again, in JSON
        if isinstance(value, str) and _THOUSANDS.fullmatch(value):
            value = value.replace(",", "")
        if isinstance(value, str) and _TOKEN_COUNT.fullmatch(value):
            value = int(value.partition(".")[0])  # pandas writes 7.0 where a column has gaps
        if type(value) is not int or not least <= value <= most:
            text = f"{shown(value, repr)}; expected {_TOKENS.format(least, most)}{hint if value == 0 else ''}"
            raise self.error(text, column)
        return value

    def seconds(self, value: object, column: str, what: str, read: Callable[[Any], float]) -> float:
        """A time in seconds, from whatever moment on. Raises WorkloadError, with `what` was expected."""
        try:
            number = read(value)
        except (ValueError, TypeError, OverflowError):
            number = math.nan
        if not abs(number) < 2**53:
            raise self.error(f"{shown(value, repr)}; expected {what}", column)
        return number


def moment(text: str) -> float:
    """A date and time as seconds since 1970, in ISO 8601, or as web servers (27/Nov/2026:12:00:00 +0000) and mail
    (RFC 2822) write it; without a time zone, or with UTC behind it, it is UTC. Raises ValueError.
    """
    text = str(text)
    if _OF_A_WEB_SERVER.match(text):
        read = datetime.strptime(text.strip("[]"), "%d/%b/%Y:%H:%M:%S %z")
    elif text[:3].isalpha():
        read = parsedate_to_datetime(text)
    else:
        read = datetime.fromisoformat(text.removesuffix(" UTC"))  # which BigQuery writes
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()


def are_ids(value: object) -> bool:
    """Whether it is a list of numbers of 64 bits, as blocks have."""
    if not isinstance(value, list | tuple):
        return False
    return all(type(number) is int and 0 <= number < 2**64 for number in value)


class Row(NamedTuple):
    """One request of a trace. `time_s` counts from any moment; `blocks` are the ids of its prompt's blocks."""

    place: Place
    time_s: float
    column: str  # of the time
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    conversation: str | None = None  # which one it is part of, where the file says so
    block_tokens: int | None = None  # of each of the blocks; None: workload.block_tokens
    max_tokens: int | None = None  # of its output, as its client asked; None: not known


#: Reads the rows of a file; see `trace_source`.
Rows = TypeVar("Rows", bound=Callable[..., Iterator[Row]])


def csv_rows(
    config: WorkloadConfig,
    time: str = "",
    seconds: Callable[[str], float] = float,
    *,
    least: int = 1,
    least_output: int = 1,
) -> Iterator[Row]:
    """The rows of a CSV file whose first line names the columns; others than those of the format may be there too.

    `seconds` reads the column of times, `time` says what it has to hold. Prompts have `least` tokens.
    """
    columns, wants = CSV_FORMATS[config.source], _wanted(config.source)
    names: list[str] = []
    for number, line in read_lines(config.path or ""):
        place = Place(config.path, number)
        try:
            cells = csv_cells(line)
        except ValueError as error:
            raise place.error(f"{error}; {wants}") from error
        if not names:
            names = _checked_header(place, cells, config.source)
            continue
        if len(cells) < len(names):
            text = f"is missing; expected {len(names)} columns as in the first line: is the line cut off?"
            raise place.error(text, names[len(cells)])
        if len(cells) > len(names):
            raise place.error(f"{len(cells)} columns; expected {len(names)} as in the first line")
        row = dict(zip(names, cells, strict=True))
        yield Row(
            place,
            place.seconds(row[columns.time], columns.time, time, seconds) if columns.time else 0.0,
            columns.time or "",
            place.tokens(row[columns.prompt], columns.prompt, least=least, most=MAX_PROMPT_TOKENS, hint=_NOTHING),
            place.tokens(row[columns.output], columns.output, least=least_output, most=MAX_WHOLE, hint=_NOTHING),
            conversation=row.get("Session ID") or None,
        )


def _checked_header(place: Place, names: list[str], source: str) -> list[str]:
    """The names of the columns. Raises WorkloadError if one is missing, with the source that reads such a file."""
    wanted = CSV_FORMATS[source].names
    if set(wanted) <= set(names):
        return names
    wants = f"workload={source} expects the columns {', '.join(wanted)}{_reader(','.join(names))}"
    raise place.error(f"{shown(','.join(names), repr)}; {wants}")


def _wanted(source: str) -> str:
    """What a line of a format has to be."""
    if source in CSV_FORMATS:
        names = ", ".join(CSV_FORMATS[source].names)
        return f"expected the columns {names}, separated by commas, as workload={source} reads"
    if source == "recorded":
        return "expected a request behind its header"
    return f"expected a JSON object with {', '.join(_JSON_FIELDS)}, as workload={source} reads"


def _reader(line: str) -> str:
    """Which other source reads a file with such a first line, as the end of a sentence."""
    names = {name.strip() for name in line.split(",")}
    if fitting := [name for name, columns in CSV_FORMATS.items() if {*columns.names} <= names]:
        return f"; workload={fitting[0]} reads this one"
    return "; workload=mooncake and workload=timed_trace read JSON lines" if line.startswith("{") else ""


def json_rows(config: WorkloadConfig, least: int = 1, *, unit_s: float) -> Iterator[Row]:
    """The rows of a file of JSON lines: `timestamp` in units of `unit_s` seconds, `input_length`, `output_length`,
    and `hash_ids`, one for each block of `workload.block_tokens` tokens. Other fields may be there too. Prompts and
    outputs have `least` tokens.
    """
    time, roots = f"a number of {'seconds' if unit_s == 1 else 'milliseconds'}", dict[str, str]()
    for number, line in read_lines(config.path or ""):
        place = Place(config.path, number)
        try:
            row = json_object(line)
        except ValueError as error:
            hint = _reader(line.decode(errors="replace").strip())
            raise place.error(f"{error}; {_wanted(config.source)}{hint}") from error
        for name in _JSON_FIELDS:
            if name not in row:
                raise place.error(f"is missing; {_wanted(config.source)}", name)
        prompt = place.tokens(
            row["input_length"], "input_length", least=least, most=MAX_PROMPT_TOKENS, hint=_NOTHING
        )
        ids, blocks = row["hash_ids"], -(-prompt // config.block_tokens)
        if not are_ids(ids):
            raise place.error(f"{shown(ids, repr)}; expected a list of whole numbers below 2**64", "hash_ids")
        if len(ids) != blocks:
            has = (
                f"expected {blocks}, one for each {config.block_tokens} of {prompt} tokens (workload.block_tokens)"
            )
            raise place.error(f"{len(ids)} ids; {has}", "hash_ids")
        yield Row(
            place,
            place.seconds(row["timestamp"], "timestamp", time, _number) * unit_s,
            "timestamp",
            prompt,
            place.tokens(row["output_length"], "output_length", least=least, most=MAX_WHOLE, hint=_NOTHING),
            tuple(ids),
            _conversation(row, roots),
        )


def _conversation(row: dict[str, Any], roots: dict[str, str]) -> str | None:
    """The conversation of a row: its `session_id`, or the first of the chats that its `chat_id` goes on from by
    `parent_chat_id` (-1: none). `roots` has those of the rows before. None: it says nothing.
    """
    if row.get("session_id") is not None:
        return str(row["session_id"])
    if row.get("chat_id") is None:
        return None
    own, parent = str(row["chat_id"]), str(row.get("parent_chat_id"))
    root = roots[own] = own if parent in ("-1", "None") else roots.get(parent, parent)
    return root


def _number(value: object) -> float:
    """A JSON number. Raises TypeError, or OverflowError for a whole number beyond all floats."""
    if type(value) not in (int, float):
        raise TypeError
    return float(value)  # type: ignore[arg-type]


def trace_requests(rows: Iterator[Row], config: WorkloadConfig, *, vocab_size: int, seed: int) -> Iterator[Request]:
    """The requests of a trace's rows that are within `workload.window` and part of `workload.sample`. A row keeps
    its number and its prompt, and whether it is sampled, whatever other rows are left out.

    Rows with the ids of their blocks get prompts that share what the ids share, others prompts of their own. Rows
    without output were refused by the server that was recorded, and are left out. Raises WorkloadError for times
    that go backwards and for a trace without a request.
    """
    arrivals, choices = arrival_times(config, np.random.default_rng(seed)), np.random.default_rng([seed, 1])
    begin_s, end_s = config.window_s
    at_s, made, sampled = 0.0, 0, dict[str, bool]()
    number = -1
    for number, row, at_s in _timed(rows):
        if at_s >= end_s:
            break
        share = choices.random()  # of every row, so that a larger sample has all of a smaller one
        is_sampled = share < config.sample
        if row.conversation is not None:
            is_sampled = sampled.setdefault(row.conversation, is_sampled)
        if at_s < begin_s or not is_sampled or not row.output_tokens:
            continue
        own, length, size = not row.blocks, row.prompt_tokens, row.block_tokens or config.block_tokens
        first = number << 24  # a prompt has fewer blocks than that
        ids = range(first, first - (-length // size)) if own else row.blocks
        prompt = HashedPrompt(ids, size, length, vocab_size, 2 * seed % 2**64 + own)
        arrival_s = (at_s - begin_s) / config.rate_scale if config.arrival == "trace" else next(arrivals)
        most = None if row.max_tokens is None else max(row.max_tokens, row.output_tokens)
        yield make_request(number, prompt, row.output_tokens, arrival_s, config, seed, most=most)
        made += 1
    if not made:
        why = ""
        if number < 0:
            why = f"; {_wanted(config.source)}"
        elif config.window:
            why = f" in workload.window={config.window}; its last arrives after {at_s:g} s"
        elif config.sample < 1:
            why = f" in workload.sample={config.sample:g} of {number + 1}; take a larger share"
        else:
            why = f" that was served: none of {number + 1} has output"
        raise WorkloadError(f"workload.path={shown(config.path)}: holds no request{why}")


def trace_source(name: str) -> Callable[[Rows], Rows]:
    """Make what reads the rows of a file, `workload.path`, the workload source `name`: see `trace_requests`."""

    def registered(rows: Rows) -> Rows:
        @wraps(rows)
        def read(config: WorkloadConfig, *, vocab_size: int, seed: int) -> Iterator[Request]:
            return trace_requests(rows(config), config, vocab_size=vocab_size, seed=seed)

        WORKLOAD_SOURCES.register(name)(read)
        return rows

    return registered


def _timed(rows: Iterator[Row]) -> Iterator[tuple[int, Row, float]]:
    """The rows with number and seconds after the first. Raises WorkloadError where time goes backwards."""
    start_s, latest_s = 0.0, -math.inf
    for number, row in enumerate(rows):
        if row.time_s < latest_s:
            before = f"{row.time_s - start_s:g} s after the start; expected at least the {latest_s - start_s:g} s"
            raise row.place.error(f"the time goes backwards: {before} of the line before", row.column)
        start_s, latest_s = start_s if number else row.time_s, row.time_s
        if row.time_s - start_s > MOST_SECONDS:
            raise row.place.error("more than a year after the first", row.column)
        yield number, row, row.time_s - start_s
