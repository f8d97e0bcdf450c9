"""Reads the files of a recorded run, to be played back."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvlab.errors import ConfigError, RecordError
from kvlab.run_files import REQUESTS, STEPS, SUMMARY
from kvlab.simulation.recording import Outputs, Recording

KEY = "executor.recording"
_FRONT_END = ("framework.request_us", "framework.prompt_token_us", "framework.output_token_us")


def read_recording(path: str) -> Recording:
    """The run in the directory `path`. Raises ConfigError or RecordError."""
    directory = Path(path)
    try:
        summary = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
        status, settings = summary["status"], summary.get("config", {})
    except OSError as error:
        raise ConfigError(KEY, path, f"is no directory of a recorded run, it has no {SUMMARY}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{directory / SUMMARY}: cannot be read as a run's summary: {error}") from error
    if status != "finished":
        raise ConfigError(KEY, path, f"its status is {status}; only a run that finished can be played back")
    for name in _FRONT_END:
        if settings.get(name):
            text = f"has the times of clients behind a front end, not the engine's; record it with {name}=0"
            raise ConfigError(KEY, path, text)
    steps, requests = _rows(directory / STEPS), _rows(directory / REQUESTS)
    try:
        outputs = {
            (row["request_id"], row["sample"]): Outputs(row["output_token_ids"] or (), row["token_times_s"] or ())
            for row in requests
        }
        recording = Recording(path, steps, outputs)
        if not (recording.ends_s and recording.num_blocks):
            raise ConfigError(KEY, path, "has no steps; name a run that produced tokens")
    except (KeyError, TypeError) as error:
        raise ConfigError(KEY, path, f"was recorded by an older version, without {error}; run it again") from error
    return recording


def _rows(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        raise ConfigError(KEY, file.parent, f"has no {file.name}; name a run that was recorded to its end")
    try:
        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise RecordError(f"{file}: cannot be read: {error}") from error
    return rows
