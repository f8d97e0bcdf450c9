"""Tables of one's own: CSV with a first line of names, JSON or Parquet; which column is what is found or said."""

import math
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import yaml

from kvlab.core import MAX_WHOLE
from kvlab.errors import ConfigError, WorkloadError, shown
from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import Importer, ImportOptions, json_objects
from kvlab.workloads.lines import MAX_LINE_BYTES, csv_cells, read_head, read_lines
from kvlab.workloads.prompts import MAX_PROMPT_TOKENS
from kvlab.workloads.trace_format import TracedRequest, is_parquet
from kvlab.workloads.traces import Place, are_ids, moment

_NESTED = 3  # objects in objects, as in a log's response.usage.prompt_tokens_details
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_NOTHING = frozenset(("", "NULL", "null", "None", "NaN", "nan", "\\N"))  # cells that databases and pandas write
_NO_LIMIT = (-1, "-1")  # as max_tokens
#: Names of columns in files that people have, by ours. One of times may have its unit behind it, as timestamp_ms.
NAMES: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("columns.yaml").read_text(encoding="utf-8"))


def _delimiter(line: str) -> str:
    """What divides the cells of a table with this first line."""
    return max(",;\t|", key=line.count)


def _cells(line: bytes, delimiter: str, lines: Iterator[tuple[int, bytes]]) -> list[str]:
    """Those of a line of CSV and of the lines behind it that a cell in quotes goes on in, as texts of users do.
    Raises ValueError.
    """
    try:
        return csv_cells(line, delimiter)
    except ValueError:
        parts, size, is_open = [line], len(line), line.count(b'"') % 2
        if not is_open:
            raise
    while is_open:
        _, more = next(lines, (0, b""))
        parts.append(more)
        size += len(more)
        is_open ^= more.count(b'"') % 2
        if not more or size > MAX_LINE_BYTES:
            raise ValueError("a cell in quotes does not end")
    return csv_cells(b"".join(parts), delimiter)


def _plain(name: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)  # promptTokens
    return re.sub(r"\W+", "_", words.lower()).strip("_")


def _unit_of(column: str) -> str | None:
    """The unit that a column's name ends with."""
    word = _plain(column).rpartition("_")[2]
    return word if word in UNITS else None


def _those_of(name: str, columns: Iterable[str]) -> list[str]:
    """The columns whose names are known as those of `name`, the best known first."""
    plain = {column: _plain(column.rpartition(".")[2]) for column in columns}
    if name == "arrival":
        plain = {column: own.removesuffix(f"_{_unit_of(column)}") for column, own in plain.items()}
    known = NAMES[name]
    return sorted((column for column in plain if plain[column] in known), key=lambda own: known.index(plain[own]))


@lru_cache
def arrival_of(names: tuple[str, ...]) -> str | None:
    """Which of these columns has the times of arrival; None: none that is known."""
    return next(iter(_those_of("arrival", names)), None)


def seconds_of(place: Place, value: Any, column: str, unit: str | None) -> float:
    """A time as seconds, where it is a number in `unit` or that of the column's name. Raises WorkloadError."""
    unit = unit or _unit_of(column)
    expected = "a number, or a date and time such as 2026-11-16T18:15:46Z"
    try:
        number = float(value)
    except (TypeError, ValueError):
        return place.seconds(value, column, expected, moment)
    if not math.isfinite(number):
        raise place.error(f"{shown(value, repr)}; expected {expected}", column)
    if unit is None and abs(number) > 1e11:
        likely = "ms" if abs(number) < 1e14 else "us" if abs(number) < 1e17 else "ns"
        raise place.error(f"{shown(value)} is no time in seconds; set unit={likely} if it is", column)
    return number * UNITS[unit or "s"]


def _ends(column: str) -> Iterator[int]:
    """Where the name of a column ends, and those of the fields that it is within."""
    yield from (place for place, character in enumerate(column) if character == ".")
    yield len(column)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose fields that are objects are columns, as usage.prompt_tokens."""
    for _ in range(_NESTED):
        if not any(isinstance(value, dict) for value in row.values()):
            break
        parts = (
            [(name, value)] if not isinstance(value, dict) else [(f"{name}.{own}", value[own]) for own in value]
            for name, value in row.items()
        )
        row = dict(chain.from_iterable(parts))
    return row


@IMPORTERS.register("table")
class TableImporter(Importer):
    """A request in each line of CSV or JSON lines, each item of a JSON list, or each row of Parquet."""

    what: ClassVar[str] = "a table of requests"

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        self._names: list[str] = []  # of the columns that were seen; of CSV all, once its first line was read
        self._is_fixed = False  # no other columns come, as in CSV

    @classmethod
    def recognises(cls, head: str) -> bool:
        """Whatever has the numbers of tokens under a name that is known."""
        head = head.lstrip()
        line = head.partition("\n")[0]
        if line.startswith(("{", "[")):
            return bool(_those_of("prompt_tokens", re.findall(r'"([^"\\]+)"\s*:', head)))
        return bool(_those_of("prompt_tokens", [name.strip(' "\r') for name in line.split(_delimiter(line))]))

    def requests(self) -> Iterator[TracedRequest]:
        columns: dict[str, str] = {}
        there: set[str] = set()
        for place, row in self._rows():
            self.place = place
            if not there or not row.keys() <= there:  # of rows with names of their own each, new ones alone
                fresh = [] if there else list(self._names)
                there.update(fresh)
                added = [name for name in row if name not in there]
                self._names += added
                there.update(added)
                self._find(place, columns, fresh + added)
            if row.get(columns.get("prompt_tokens", "")) is not None:
                try:
                    request = self._request(place, row, columns)
                except WorkloadError as error:
                    self.broken(error)
                else:
                    yield request
            elif "prompts" in self.options.drop:
                self.dropped += 1
            else:
                text = "is empty; expected a number of tokens; drop=prompts leaves out the requests without"
                raise place.error(text, columns["prompt_tokens"])
        self._check_said()
        if self.place is not None and "prompt_tokens" not in columns:
            raise self._unnamed(self.place)
        used = {column[:end] for column in columns.values() for end in _ends(column)}
        self.unread = tuple(name for name in self._names if name and name not in used)

    def _rows(self) -> Iterator[tuple[Place, dict[str, Any]]]:
        path = self.options.path
        if is_parquet(path):
            from kvlab.workloads.trace_parquet import read_table  # this late: few have such files

            for number, row in read_table(path):
                yield Place(path, number, "row"), _flat(row)
        elif read_head(path).lstrip().startswith(("{", "[")):
            for place, row in json_objects(path, "a JSON object with a request", self.broken):
                yield place, _flat(row)
        else:
            yield from self._csv_rows()

    def _csv_rows(self) -> Iterator[tuple[Place, dict[str, Any]]]:
        names, delimiter, lines = self._names, ",", read_lines(self.options.path)
        for number, line in lines:
            place = Place(self.options.path, number)
            try:
                if not names:
                    delimiter = _delimiter(line.decode(errors="replace"))
                cells = _cells(line, delimiter, lines)
            except ValueError as error:
                wrong = place.error(f"{error}; expected a line of a CSV file")
                if not names or line.count(b'"') % 2:  # an open cell took the lines behind it
                    raise wrong from error
                self.broken(wrong)
                continue
            if not names and all(re.fullmatch(r"[-+.\d]+", cell) for cell in cells):
                text = "numbers alone; expected the names of the columns in the first line, as"
                raise place.error(f"{text} arrival,prompt_tokens,output_tokens")
            if not names:
                names += cells
                self._is_fixed = True
            elif len(cells) != len(names):
                self.broken(place.error(f"{len(cells)} columns; expected {len(names)} as in the first line"))
            else:
                yield place, {name: cell for name, cell in zip(names, cells, strict=True) if cell not in _NOTHING}

    def _find(self, place: Place, columns: dict[str, str], fresh: list[str]) -> None:
        """Add to the columns by our names those that are among the `fresh` ones. Raises ConfigError or
        WorkloadError.
        """
        names = self._names
        for name in (name for name in NAMES if name not in columns):
            said = self.options.columns.get(name)
            for own in _those_of(name, fresh)[:1] if said is None else [said] * (said in fresh):
                if names.count(own) > 1:
                    raise place.error("is there twice; rename one of them", own)
                columns[name] = own
        if self._is_fixed:
            self._check_said()
        if "prompt_tokens" not in columns and (self._is_fixed or "prompts" not in self.options.drop):
            raise self._unnamed(place)

    def _unnamed(self, place: Place) -> WorkloadError:
        """No column has the tokens of prompts, or none so far: of JSON the first request may be one that failed."""
        there, said = ", ".join(map(shown, self._names)), self.options.columns.get("prompt_tokens")
        text = f"which column has the prompt's tokens? It has {there}; set columns.prompt_tokens=NAME"
        if said is not None:
            text = f"is not there, beside {there}"
        if not self._is_fixed:
            text += "; drop=prompts leaves out the requests without"
        return place.error(text, said)

    def _check_said(self) -> None:
        """Raises ConfigError for a column that was said and is not there."""
        for name, said in self.options.columns.items():
            if self._names and said not in self._names:
                text = f"the file has no such column; it has {', '.join(map(shown, self._names))}"
                raise ConfigError(f"columns.{name}", said, text)

    def _request(self, place: Place, row: dict[str, Any], columns: dict[str, str]) -> TracedRequest:
        said = {name: None if (value := row.get(column)) == "" else value for name, column in columns.items()}
        prompt = place.tokens(said["prompt_tokens"], columns["prompt_tokens"], least=0, most=MAX_PROMPT_TOKENS)
        numbers: dict[str, Any] = {"prompt_tokens": prompt}
        if said.get("max_tokens") in _NO_LIMIT:
            del said["max_tokens"]
        for name in ("output_tokens", "max_tokens", "cached_tokens"):
            if said.get(name) is not None:
                numbers[name] = place.tokens(said[name], columns[name], least=0, most=MAX_WHOLE)
        if said.get("arrival") is not None:
            numbers["arrival_s"] = seconds_of(place, said["arrival"], columns["arrival"], self.options.unit)
        for name in ("ttft_ms", "e2el_ms"):
            if said.get(name) is not None:
                numbers[name] = place.seconds(said[name], columns[name], "a number of milliseconds", float)
        blocks = said.get("blocks")
        if blocks is not None:
            expected = -(-prompt // self.block_tokens)
            if not are_ids(blocks):
                raise place.error("expected a list of whole numbers below 2**64", columns["blocks"])
            # Some sources have ids of whole blocks alone: what is behind them is nobody else's.
            own = list(blocks) + [2**63 + place.line] * (expected - len(blocks))
            if len(own) != expected or expected - len(blocks) > 1:
                text = f"{len(blocks)} ids; expected {expected}, one for each {self.block_tokens} tokens"
                raise place.error(text, columns["blocks"])
            numbers["hashes"] = own
        session = said.get("session")
        return TracedRequest(**numbers, session=None if session is None else str(session))
