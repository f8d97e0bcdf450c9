"""kvlab import: traffic of others as a trace of kvlab, for workload=recorded.

kvlab import requests.csv to=mine.jsonl
kvlab import log.csv columns.arrival=t columns.prompt_tokens=in columns.output_tokens=out unit=ms
kvlab import batch.jsonl tokenizer=fetched:smollm2 to=batch.trace.jsonl.gz
kvlab run hardware=h100_sxm model=llama3_1_8b workload=recorded workload.path=mine.jsonl

The format is recognised: Azure's, BurstGPT's, Mooncake's, Dynamo's and vLLM's traces, vLLM's log, OpenTelemetry's
spans, requests of OpenAI's API, results of vllm bench serve, AIPerf, GuideLLM and inference-perf, runs of kvlab,
and tables of one's own (CSV, JSON or Parquet). Text is hashed with a secret and not kept.
Of a table, columns.arrival=NAME says which column has the times where its name does not, and so do columns.
prompt_tokens, output_tokens, max_tokens, session, blocks, cached_tokens, ttft_ms and e2el_ms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvlab.cli.settings import command, refuse_settings, setting
from kvlab.config.values import one_of
from kvlab.errors import ConfigError

if TYPE_CHECKING:
    from kvlab.lab.traffic import Imported

_UNITS = ("s", "ms", "us", "ns")
_DROPPED = ("times", "outputs", "prompts", "broken")


@dataclass
class ColumnSettings:
    """Of a table: which column has what, where its name does not say it."""

    arrival: str | None = setting(None, "the column of arrival times", "NAME")
    prompt_tokens: str | None = setting(None, "of the prompt's number of tokens", "NAME")
    output_tokens: str | None = setting(None, "of the output's number of tokens", "NAME")
    session: str | None = setting(None, "of the conversation that a request is part of", "NAME")
    blocks: str | None = setting(None, "of a list of ids, one for each block of 16 tokens of the prompt", "NAME")
    max_tokens: str | None = setting(None, "of the output tokens that were asked for at most", "NAME")
    cached_tokens: str | None = setting(None, "of the prompt tokens that the server's cache had", "NAME")
    ttft_ms: str | None = setting(None, "of the time to the first token", "NAME")
    e2el_ms: str | None = setting(None, "of the time to the last", "NAME")


@dataclass
class ImportSettings:
    """What an import takes."""

    to: str | None = setting(None, "the trace; .gz compresses it, .parquet makes it Parquet", "FILE")
    format: str | None = setting(None, "of the file, where it is not recognised", "NAME")
    unit: str | None = setting(None, "of times that are numbers: s, ms, us or ns", "UNIT")
    tokenizer: str | None = setting(None, "for text: a folder with tokenizer.json, or fetched:smollm2", "WHERE")
    hash_with: str | None = setting(None, "what hashes are keyed with; a new key is made and forgotten", "FILE")
    sort: bool = setting(False, "sort requests by arrival, all in memory; or --sort", "true")
    drop: list[str] = setting(
        [], "leave out requests without times, outputs or prompts (of a table), and broken lines", "NAME,NAME"
    )
    plugins: list[str] = setting([], "modules of your own to import first, with a format", "[MODULE,...]")
    columns: ColumnSettings = field(default_factory=ColumnSettings)

    def __post_init__(self) -> None:
        for name in self.drop:
            one_of("drop", name, _DROPPED)
        if self.unit is not None:
            one_of("unit", self.unit, _UNITS)


@command(__doc__, ImportSettings, bare=False, plugins=True)
def main(settings: ImportSettings, files: list[str]) -> int:
    refuse_settings(ImportSettings, files)
    if len(files) != 1:
        raise ConfigError("file", " ".join(files) or "none", "name one file to import")
    # Imported this late so that --help answers at once.
    from kvlab.lab.traffic import import_traffic

    print(_said(import_traffic(files[0], settings), files[0]))
    return 0


def _said(imported: Imported, file: str) -> str:
    """What was imported, what is not known of it, and what can be done with it."""
    lines = [f"{file}: {imported.what}, {imported.facts}", *(f"  {text}" for text in imported.unknown)]
    lines += [f"written: {imported.path}", f"run it: {imported.command}"]
    return "\n".join(lines)
