"""What importers of traffic have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvlab.config import WorkloadConfig
from kvlab.errors import WorkloadError, shown
from kvlab.workloads.lines import json_object, read_document, read_lines
from kvlab.workloads.prompt_blocks import BlockHasher, Encode
from kvlab.workloads.trace_format import TracedRequest
from kvlab.workloads.traces import Place, Row


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What a file does not say itself. `encode` makes tokens of text, where there is a tokenizer; `columns` are
    names of a table's columns by ours, and `unit` is that of its times.
    """

    path: str
    hasher: BlockHasher
    encode: Encode | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    unit: str | None = None


class Importer(ABC):
    """Reads one format. `block_tokens`: of the prompt that one hash stands for, known when the first request is;
    `unknown`: what the format never tells; `in_order`: of arrival, else of something else, as of the ends.
    """

    what: ClassVar[str]  # in a sentence
    block_tokens: int = 16
    unknown: ClassVar[tuple[str, ...]] = ()
    in_order: ClassVar[bool] = True
    reads_text: ClassVar[bool] = False

    def __init__(self, options: ImportOptions) -> None:
        self.options = options

    @classmethod
    @abstractmethod
    def recognises(cls, head: str) -> bool:
        """Whether a file that begins like this is one of its format."""

    @abstractmethod
    def requests(self) -> Iterator[TracedRequest]:
        """Its requests, with arrivals from whatever moment on. Raises WorkloadError."""


class JsonLinesImporter(Importer):
    """Of a file with a JSON object in each line. `expected`: what such a line is."""

    expected: ClassVar[str]

    @abstractmethod
    def of_line(self, place: Place, row: dict[str, Any]) -> Iterable[TracedRequest]:
        """The requests of a line. What its look-ups raise is said of that line."""

    def requests(self) -> Iterator[TracedRequest]:
        """See Importer."""
        for number, line in read_lines(self.options.path):
            place = Place(self.options.path, number)
            try:
                for request in self.of_line(place, json_object(line)):
                    request.check(self.block_tokens)
                    yield request
            except WorkloadError:
                raise
            except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
                raise place.error(f"{_mistake(error)}; expected {self.expected}") from error


class DocumentImporter(Importer):
    """Of a file that is one JSON value. `expected`: what it is."""

    expected: ClassVar[str]

    @abstractmethod
    def of_document(self, document: Any) -> Iterable[TracedRequest]:
        """Its requests. What its look-ups raise is said of the file."""

    def requests(self) -> Iterator[TracedRequest]:
        """See Importer."""
        try:
            for request in self.of_document(read_document(self.options.path)):
                request.check(self.block_tokens)
                yield request
        except WorkloadError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            text = f"{_mistake(error)}; expected {self.expected}"
            raise WorkloadError(f"{shown(self.options.path)}: {text}") from error


def _mistake(error: Exception) -> str:
    """What is wrong with a row that was not as expected."""
    return f"has no {error}" if isinstance(error, KeyError) else str(error)


class RowImporter(Importer):
    """Of a trace that runs read as it is: `source` is what workload.source calls it, `rows` are those of its file,
    whose first line has the `marks`.
    """

    source: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]

    @staticmethod
    @abstractmethod
    def rows(config: WorkloadConfig) -> Iterator[Row]:
        """See class. Raises WorkloadError."""

    @classmethod
    def recognises(cls, head: str) -> bool:
        """See Importer."""
        line = head.partition("\n")[0]
        return all(mark in line for mark in cls.marks)

    def requests(self) -> Iterator[TracedRequest]:
        """See Importer."""
        path, size = self.options.path, self.block_tokens
        config = WorkloadConfig(self.source, self.source, path=path, arrival="trace", block_tokens=size)
        for row in self.rows(config):
            blocks = row.blocks or None
            yield TracedRequest(row.prompt_tokens, row.time_s, row.output_tokens, blocks, session=row.conversation)
