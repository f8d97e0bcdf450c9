"""kvlab export: a run as a benchmark report of llm-d (schema v0.2), beside those of other tools.

kvlab export outputs/2026-01-01/12-00-00.000000
kvlab export outputs/2026-01-01/12-00-00.000000 to=report.yaml
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvlab.cli.settings import read_settings, run_command, setting, unknown_setting
from kvlab.errors import ConfigError


@dataclass
class ExportSettings:
    """Where a report goes."""

    to: str = setting("benchmark_report.yaml", "the report", "FILE")


def _answer(arguments: list[str]) -> int:
    settings, names = read_settings(ExportSettings, arguments)
    if len(names) != 1:
        raise ConfigError("run", " ".join(names) or None, "name one run: kvlab export outputs/... to=report.yaml")
    if "=" in names[0] and not Path(names[0]).exists():
        raise unknown_setting(ExportSettings, names[0])
    from kvlab.cli.roofline import find_run
    from kvlab.lab.files import write_text
    from kvlab.lab.results.llm_d import report_text
    from kvlab.lab.results.records import read_run

    run = read_run(find_run(names[0]))
    write_text(Path(settings.to), report_text(run))
    print(f"{run.name}: {settings.to}")
    return 0


def main() -> None:
    """Run the command line."""
    run_command(__doc__, ExportSettings, _answer, bare=False)
