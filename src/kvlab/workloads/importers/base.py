"""What importers of traffic have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from kvlab.config import WorkloadConfig
from kvlab.errors import WorkloadError, shown
from kvlab.workloads.lines import is_indented, json_object, read_document, read_documents, read_head, read_lines
from kvlab.workloads.prompt_blocks import BlockHasher, Encode
from kvlab.workloads.trace_format import TracedRequest
from kvlab.workloads.traces import Place, Row


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What a file does not say itself. `encode` makes tokens of text, where there is a tokenizer; `columns` are
    names of a table's columns by ours, `unit` is that of its times, and `drop` what requests may lack that are left
    out then.
    """

    path: str
    hasher: BlockHasher
    encode: Encode | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    unit: str | None = None
    drop: Collection[str] = ()


class Importer(ABC):
    """Reads one format. `block_tokens`: of the prompt that one hash stands for, known when the first request is;
    `unknown`: what the format never tells; `in_order`: of arrival, else of something else, as of the ends.
    A file of the format `begins` so, and has all `marks` in its first line, or soon where it has no `lines`.
    """

    what: ClassVar[str]  # in a sentence
    begins: ClassVar[str] = ""
    marks: ClassVar[tuple[str, ...]] = ()
    lines: ClassVar[bool] = True
    block_tokens: int = 16
    unknown: ClassVar[tuple[str, ...]] = ()
    in_order: ClassVar[bool] = True
    reads_text: ClassVar[bool] = False

    def __init__(self, options: ImportOptions) -> None:
        self.options = options
        self.place: Place | None = None  # of the request that was read last, where requests have lines
        self.dropped = 0  # requests that were left out: broken ones, and those without a number of prompt tokens
        self.first_broken = ""  # what was wrong with the first of those that cannot be read
        self.refused = 0  # requests that the source counts and does not have, since its server refused them
        self.counted = 0  # prompt tokens by the file's own count, where lengths are those of its texts
        self.unread: tuple[str, ...] = ()  # columns that nothing is known of, once all was read

    @classmethod
    def recognises(cls, head: str) -> bool:
        """Whether a file that begins like this is one of its format."""
        seen = head.lstrip()
        seen = seen.partition("\n")[0] if cls.lines else seen
        return seen.startswith(cls.begins) and all(mark in seen for mark in cls.marks)

    def error(self, reason: str) -> WorkloadError:
        """What is wrong with the file."""
        return WorkloadError(f"{shown(self.options.path)}: {reason}")

    def broken(self, error: WorkloadError) -> None:
        """A line cannot be read: it is left out, or raises that where nobody asked to."""
        if "broken" not in self.options.drop:
            raise WorkloadError(f"{error}; drop=broken leaves out what cannot be read") from error
        self.dropped += 1
        self.first_broken = self.first_broken or str(error)

    @abstractmethod
    def requests(self) -> Iterator[TracedRequest]:
        """Its requests, with arrivals from whatever moment on; those of 0 tokens too. Raises WorkloadError."""


class JsonImporter(Importer):
    """Of a file of JSON. `expected`: what it, or each of its lines, is."""

    expected: ClassVar[str]

    def checked(
        self, read: Callable[[], Iterable[TracedRequest]], error: Callable[[str], WorkloadError]
    ) -> Iterator[TracedRequest]:
        """The requests that are read. What look-ups and checks raise becomes an `error`."""
        try:
            for request in read():
                request.check(self.block_tokens, least=0)
                yield request
        except WorkloadError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as mistake:
            text = f"has no {mistake}" if isinstance(mistake, KeyError) else str(mistake)
            raise error(f"{text}; expected {self.expected}") from mistake


def json_objects(
    path: str, expected: str, broken: Callable[[WorkloadError], None]
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Those of a file that has one in each line, or over several lines, or that is a list of them. Anything else is
    `broken`, with what is `expected`.
    """
    head = read_head(path)
    if head.lstrip().startswith("[") or is_indented(head):
        for number, row in enumerate(read_documents(path) if is_indented(head) else read_document(path), 1):
            place = Place(path, number, "item")
            if isinstance(row, dict):
                yield place, row
            else:
                broken(place.error(f"not a JSON object; expected {expected}"))
        return
    for number, line in read_lines(path):
        place = Place(path, number)
        try:
            row = json_object(line)
        except ValueError as error:
            broken(place.error(f"{error}; expected {expected}"))
        else:
            yield place, row


class JsonLinesImporter(JsonImporter):
    """Of a file with a JSON object in each line, or of a list of them."""

    @abstractmethod
    def of_line(self, place: Place, row: dict[str, Any]) -> Iterable[TracedRequest]:
        """The requests of a line. What its look-ups raise is said of that line."""

    def requests(self) -> Iterator[TracedRequest]:
        """See Importer."""
        for place, row in json_objects(self.options.path, self.expected, self.broken):
            self.place = place
            try:
                yield from self.checked(partial(self.of_line, place, row), place.error)
            except WorkloadError as error:
                self.broken(error)


class DocumentImporter(JsonImporter):
    """Of a file that is one JSON value."""

    lines = False

    @abstractmethod
    def of_document(self, document: Any) -> Iterable[TracedRequest]:
        """Its requests. What its look-ups raise is said of the file."""

    def requests(self) -> Iterator[TracedRequest]:
        """See Importer."""
        return self.checked(lambda: self.of_document(read_document(self.options.path)), self.error)


class RowImporter(Importer):
    """Of a trace that runs read as it is: `source` is what workload.source calls it, `rows` are of its file."""

    source: ClassVar[str]

    @staticmethod
    @abstractmethod
    def rows(config: WorkloadConfig, least: int) -> Iterator[Row]:
        """See class; prompts and outputs have `least` tokens. Raises WorkloadError."""

    def requests(self) -> Iterator[TracedRequest]:
        """See Importer."""
        path, size = self.options.path, self.block_tokens
        config = WorkloadConfig(self.source, self.source, path=path, arrival="trace", block_tokens=size)
        for row in self.rows(config, 0):
            self.place = row.place
            blocks = row.blocks or None
            yield TracedRequest(row.prompt_tokens, row.time_s, row.output_tokens, blocks, session=row.conversation)
