"""kvlab export: a run as a benchmark report of llm-d (schema v0.2), or a trace in the format of another.

kvlab export outputs/2026-01-01/12-00-00.000000
kvlab export outputs/2026-01-01/12-00-00.000000 to=report.yaml
kvlab export mine.trace.jsonl format=mooncake to=mine.mooncake.jsonl

Formats of traces: azure, burstgpt, mooncake and timed_trace (vLLM's).
"""

from dataclasses import dataclass
from pathlib import Path

from kvlab.cli.settings import command, refuse_existing, refuse_settings, setting
from kvlab.config.values import one_of
from kvlab.errors import ConfigError


@dataclass
class ExportSettings:
    """Where a report or a trace goes."""

    to: str | None = setting(None, "the file; benchmark_report.yaml of a run", "FILE")
    format: str | None = setting(None, "of a trace: azure, burstgpt, mooncake or timed_trace", "NAME")


@command(__doc__, ExportSettings, bare=False)
def main(settings: ExportSettings, names: list[str]) -> int:
    if len(names) != 1:
        raise ConfigError("run", " ".join(names) or None, "name one run: kvlab export outputs/... to=report.yaml")
    (name,) = names
    refuse_settings(ExportSettings, names)
    if settings.format is not None or Path(name).is_file():
        _export_trace(name, settings)
    else:
        from kvlab.cli.recorded import find_run
        from kvlab.lab.files import write_text
        from kvlab.lab.results.llm_d import report_text
        from kvlab.lab.results.records import read_run

        run, to = read_run(find_run(name)), settings.to or "benchmark_report.yaml"
        refuse_existing("to", Path(to))
        write_text(Path(to), report_text(run))
        print(f"{run.name}: {to}")
    return 0


def _export_trace(name: str, settings: ExportSettings) -> None:
    from kvlab.workloads.exporting import FORMATS, export_trace

    known = ", ".join(FORMATS)
    if settings.format is None:
        raise ConfigError("format", None, f"which one? A trace is exported as one of {known}")
    one_of("format", settings.format, tuple(FORMATS))
    if settings.to is None:
        raise ConfigError("to", None, "name the file: to=FILE")
    if Path(settings.to).exists() and Path(settings.to).samefile(name):
        raise ConfigError("to", settings.to, "is the trace that is exported; name another")
    refuse_existing("to", Path(settings.to))
    done = export_trace(name, settings.format, Path(settings.to))
    print(f"{name}: {done.requests:,} requests as {settings.format}, without {' and '.join(done.left_out)}")
    if done.without_output:
        print(f"  {done.without_output:,} without an output token, as those that the server refused, are left out")
    print(f"written: {settings.to}")
