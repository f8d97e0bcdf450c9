"""Import of traffic: a file of others becomes a trace of kvlab."""

import secrets
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Protocol

import yaml

from kvlab.config import ModelConfig
from kvlab.config.values import one_of
from kvlab.errors import ConfigError, WorkloadError, shown
from kvlab.lab.results.records import read_run
from kvlab.lab.settings import as_word, run_command
from kvlab.lab.traffic_counts import Counts
from kvlab.paths import CONF
from kvlab.workloads import trace_format
from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import Importer, ImportOptions, JsonLinesImporter
from kvlab.workloads.importers.table import TableImporter
from kvlab.workloads.lines import read_head
from kvlab.workloads.prompt_blocks import BlockHasher, text_encoder
from kvlab.workloads.trace_format import UNKNOWN, Header, TracedRequest

_LEAST_SECRET = 16  # bytes
_MOST_NAMES = 20  # of columns that were not read
_ENDINGS = frozenset((".gz", ".csv", ".tsv", ".txt", ".log", ".json", ".jsonl", ".ndjson", ".parquet", ".trace"))


class ImportSettings(Protocol):
    """See kvlab.cli.import_."""

    to: str | None
    format: str | None
    columns: Any
    unit: str | None
    tokenizer: str | None
    hash_with: str | None
    sort: bool
    drop: list[str]


@dataclass(frozen=True, slots=True)
class Imported:
    """A trace that was written: of what format, its figures, sentences about what is not known, and a command that
    runs it.
    """

    path: Path
    what: str
    facts: str
    unknown: tuple[str, ...]
    command: str


def import_traffic(file: str, settings: ImportSettings) -> Imported:
    """Write the trace. Raises WorkloadError for a file that cannot be read, with its line, and ConfigError for a
    setting that does not fit it.
    """
    is_run = Path(file).is_dir()
    head = "" if is_run else read_head(file)
    if not is_run and trace_format.is_trace(file, head):
        return _as_parquet_or_lines(file, settings)
    columns = {name: value for name, value in asdict(settings.columns).items() if value is not None}
    chosen = settings.format or ("table" if columns else None)
    one_of("format", chosen or "table", IMPORTERS.names())
    kind = OwnRun if is_run else IMPORTERS.get(chosen) if chosen else _recognised(file, head)
    if "prompts" in settings.drop and not issubclass(kind, TableImporter):
        raise ConfigError("drop", "prompts", "is for tables: other files say nothing of a request without a prompt")
    if "broken" in settings.drop and not issubclass(kind, (TableImporter, JsonLinesImporter)):
        raise ConfigError("drop", "broken", "is for tables and JSON lines, of which one alone can be left out")
    hasher = BlockHasher(read_key(settings.hash_with), kind.block_tokens)
    encode = text_encoder(settings.tokenizer)
    return _import(kind(ImportOptions(file, hasher, encode, columns, settings.unit, settings.drop)), settings)


def _import(importer: Importer, settings: ImportSettings) -> Imported:
    file, hasher = importer.options.path, importer.options.hasher
    file_id = _file_id(file)
    path, counts = _target(file, settings, file_id), Counts(settings.drop, _longest_drawn())
    requests = counts.asking(importer)
    if settings.sort or not importer.in_order:
        requests = iter(sorted(requests, key=lambda request: request.arrival_s or 0.0))
    first = next(requests, None)
    if first is None:
        counts.dropped += importer.dropped
        why = f"; {counts.left_out}" if counts.nothing else ""
        why += f"; {counts.dropped:,} were left out by drop={','.join(settings.drop)}" if counts.dropped else ""
        raise WorkloadError(f"{shown(file)}: holds no request{why}")
    names = _unknown(importer, first, settings.tokenizer)
    key_id = hasher.key_id if importer.reads_text else None
    source = "run" if isinstance(importer, OwnRun) else type(importer).__module__.rpartition(".")[2]
    counted = counts.all_or_none(counts.count(chain([first], requests), file), file)
    header = Header(importer.block_tokens, key_id, settings.tokenizer, source, names, file_id=file_id)
    trace_format.write_trace(path, header, counted)
    counts.dropped += importer.dropped
    said = _limits(names, counts, importer)
    return Imported(path, importer.what, counts.text, said, _command(path, names, counts))


def _unknown(importer: Importer, first: TracedRequest, tokenizer: str | None) -> tuple[str, ...]:
    """What is not known of a trace's requests, by the first of them, as names of UNKNOWN."""
    lacks = {
        "times": first.arrival_s is None,
        "outputs": first.output_tokens is None,
        "prefixes": first.hashes is None,
        "tokens": importer.reads_text and tokenizer is None,
    }
    return tuple(name for name in UNKNOWN if name in importer.unknown or lacks[name])


def _limits(unknown: Collection[str], counts: Counts, importer: Importer) -> tuple[str, ...]:
    """What a user should know that the trace does not have, a sentence each."""
    said = [UNKNOWN[name] for name in unknown]
    if "tokens" in unknown and importer.counted:
        said.append(
            f"the file counts {importer.counted:,} prompt tokens; tokenizer=WHERE, that of its model, would"
        )
    if counts.beyond:
        said.append(counts.doubt)
    if counts.nothing:
        said.append(counts.left_out)
    if importer.refused:
        text = f"{importer.refused:,} more were refused, or not sent behind one that failed"
        said.append(f"{text}, so that this load is lighter than it was")
    if counts.dropped:
        all_of_them = counts.requests + counts.dropped
        text = f"left out by drop={','.join(counts.drop)}: {counts.dropped:,} of {all_of_them:,} requests"
        said.append(f"{text}, so that this load is lighter than it was")
    if importer.first_broken:
        said.append(f"the first that cannot be read: {importer.first_broken}")
    if importer.unread:
        more = f" and {len(importer.unread) - _MOST_NAMES:,} more" * (len(importer.unread) > _MOST_NAMES)
        names = ", ".join(map(shown, importer.unread[:_MOST_NAMES])) + more
        said.append(f"not read: {names}; columns.arrival=NAME and others say what a column has")
    return tuple(said)


def _longest_drawn() -> int:
    """Tokens of the longest output that `workload=recorded` draws where none is known."""
    config = yaml.safe_load((CONF / "workload" / "recorded.yaml").read_text(encoding="utf-8"))
    return int(config["output_len"]["max"])


def _file_id(file: str) -> str:
    return blake2b(bytes(Path(file).resolve()), digest_size=4).hexdigest()


def _target(file: str, settings: ImportSettings, file_id: str | None) -> Path:
    name = Path(file)
    while name.suffix.lower() in _ENDINGS:
        name = name.with_suffix("")
    path = Path(settings.to or f"{name.name}.trace.jsonl")
    if path.exists() and path.samefile(file):
        raise ConfigError("to", settings.to, "is the file that is imported; name another")
    if path.is_file() and path.stat().st_size:
        advice = "name another file, or move that one away"
        if not trace_format.is_trace(str(path), read_head(str(path))):
            raise ConfigError("to", path, f"is there, and no trace; {advice}")
        there = trace_format.read_header(str(path), "to")
        if there.source == trace_format.RECORDED:  # which no import makes again
            raise ConfigError("to", path, f"is there, and what kvlab record recorded; {advice}")
        if settings.to is None and there.file_id not in (None, file_id):
            text = "is there, and made of another file; to=NAME names another trace, or this one to replace it"
            raise ConfigError("to", path, text)
    return path


def _as_parquet_or_lines(file: str, settings: ImportSettings) -> Imported:
    """A trace of kvlab in the other of its two forms. Raises ConfigError for its own and for settings of others."""
    header = trace_format.read_header(file)
    if trace_format.is_parquet(file) == (settings.to or "").endswith(trace_format.PARQUET):
        text = "is a trace of kvlab already: set workload=recorded and workload.path to it"
        raise ConfigError("file", file, text)
    said = {name: getattr(settings, name) for name in ("format", "unit", "tokenizer", "hash_with", "drop")}
    said |= {f"columns.{name}": value for name, value in asdict(settings.columns).items()}
    for name, value in said.items():
        if value:
            text = ",".join(value) if isinstance(value, list) else value
            raise ConfigError(name, text, "is of files of others, and this is a trace of kvlab; leave it out")
    path, counts = _target(file, settings, header.file_id), Counts(drawn=_longest_drawn())
    requests: Iterator[TracedRequest] = (request for _, request in trace_format.read_trace(file, text=True))
    if settings.sort:
        requests = iter(sorted(requests, key=lambda request: request.arrival_s or 0.0))
    trace_format.write_trace(path, replace(header, order="arrival"), counts.count(requests, file))
    unknown = [UNKNOWN[name] for name in header.unknown if name in UNKNOWN]
    unknown += [counts.doubt] if counts.beyond else []
    return Imported(path, "a trace of kvlab", counts.text, tuple(unknown), _command(path, header.unknown, counts))


def _command(path: Path, unknown: Collection[str], counts: Counts) -> str:
    """That runs the trace: with arrivals and a context that it needs and the defaults do not have."""
    settings = ["workload=recorded", as_word("workload.path", str(path))]
    if "times" in unknown:
        settings += ["workload.arrival=poisson", "workload.rate=1"]
    if counts.longest > ModelConfig.max_seq_len:
        settings.append(f"model.max_seq_len={counts.longest}")
    return run_command(settings)


class OwnRun(Importer):
    """The directory of a run of kvlab, which has what its engine did too."""

    what: ClassVar[str] = "a run of kvlab"
    unknown: ClassVar[tuple[str, ...]] = ("prefixes",)
    in_order = False

    def requests(self) -> Iterator[TracedRequest]:
        run = read_run(Path(self.options.path))
        records, self.refused = run.requests(), int(run.metrics.get("requests/refused", 0))
        sampled = {record.request_id for record in records if record.sample}
        for record in records:
            hashes = None
            if record.request_id in sampled:  # each sample is a request, and they have the prompt in common
                size, name = 4 * record.prompt_tokens, f"{record.request_id}\0".encode()
                hashes = self.options.hasher.text((name * (size // len(name) + 1))[:size])
            yield TracedRequest(
                record.prompt_tokens,
                record.arrival_s,
                len(record.output_token_ids),
                hashes,
                finish_reason=record.finish_reason,
                cached_tokens=None if record.sample else record.cached_tokens,
                queue_ms=record.queue_ms,
                ttft_ms=record.ttft_ms,
                e2el_ms=record.e2el_ms,
                itl_ms=record.itl_ms,
            )


def _recognised(file: str, head: str) -> type[Importer]:
    """Raises ConfigError where no format is recognised."""
    names = IMPORTERS.names()
    if trace_format.is_parquet(file):
        return IMPORTERS.get("table")
    for name in sorted(names, key=lambda name: name == "table"):  # which knows least of its files
        if IMPORTERS.get(name).recognises(head):
            return IMPORTERS.get(name)
    if not head.strip():
        raise WorkloadError(f"{shown(file)}: holds no request")
    text = f"that of {shown(file)} is not recognised; known: {', '.join(names)}; of a table of your own set"
    text += " columns.prompt_tokens=NAME and others (kvlab import --help)"
    raise ConfigError("format", "auto", f"{text}; it begins with {shown(head.strip().splitlines()[0])}")


def read_key(file: str | None) -> bytes:
    """What hashes are keyed with: the file's content, or a new key. Raises ConfigError."""
    if file is None:
        return secrets.token_bytes(32)
    try:
        key = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError("hash_with", file, f"cannot be read: {error.strerror}") from error
    if not _LEAST_SECRET <= len(key) <= 64:
        raise ConfigError(
            "hash_with", file, f"has {len(key)} bytes; needed: {_LEAST_SECRET} to 64, as of openssl rand"
        )
    return key
