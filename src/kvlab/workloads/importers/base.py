"""What importers of traffic have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from kvlab.config import WorkloadConfig
from kvlab.workloads.prompt_blocks import BlockHasher, Encode
from kvlab.workloads.trace_format import TracedRequest
from kvlab.workloads.traces import Row


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
    """Reads one format. `block_tokens`: of the prompt that one hash stands for; `unknown`: what it never tells."""

    what: ClassVar[str]  # in a sentence
    block_tokens: int = 16
    unknown: ClassVar[tuple[str, ...]] = ()
    reads_text: ClassVar[bool] = False

    def __init__(self, options: ImportOptions) -> None:
        self.options = options

    @staticmethod
    @abstractmethod
    def recognises(head: str) -> bool:
        """Whether a file that begins like this is one of its format."""

    @abstractmethod
    def requests(self) -> Iterator[TracedRequest]:
        """Its requests, with arrivals from whatever moment on. Raises WorkloadError."""


def mistake(error: Exception) -> str:
    """What is wrong with a row that was not as expected."""
    return f"has no {error}" if isinstance(error, KeyError) else str(error)


class RowImporter(Importer):
    """Of a trace that runs read as it is: `source` is what workload.source calls it."""

    source: ClassVar[str]

    @abstractmethod
    def rows(self, config: WorkloadConfig) -> Iterator[Row]:
        """The rows of the file. Raises WorkloadError."""

    def requests(self) -> Iterator[TracedRequest]:
        """See Importer."""
        path, size = self.options.path, self.block_tokens
        config = WorkloadConfig(self.source, self.source, path=path, arrival="trace", block_tokens=size)
        for row in self.rows(config):
            blocks = row.blocks or None
            yield TracedRequest(row.prompt_tokens, row.time_s, row.output_tokens, blocks, session=row.conversation)
