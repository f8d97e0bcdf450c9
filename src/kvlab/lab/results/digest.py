"""A configuration in one short text: equal where the same would be measured."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvlab.config import RunConfig
from kvlab.lab.settings import flatten, measured


def config_digest(config: RunConfig, *, any_repeat: bool = False) -> str:
    """The first 16 digits of a SHA-256 of all settings that a measurement depends on.

    Left out: where it is tracked and under which name and tags, `figures`, `optimize`, `resume`, `repeats`; with
    `any_repeat` also `repeat`, so that the repeats of a point have it in common. A workload file counts with its
    content.
    """
    kept = measured(flatten(dataclasses.asdict(config)), any_repeat=any_repeat)
    if config.workload.path is not None:
        with suppress(OSError, RuntimeError):  # one that cannot be read is refused later, by who reads it
            file = Path(config.workload.path).expanduser()
            if file.is_file():  # to open a pipe may wait for ever
                kept["workload.path"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digest_of(json.dumps(kept, sort_keys=True, default=str))


def sweep_digest(points: Iterable[str]) -> str:
    """The same for a set of points, in whatever order they run."""
    return digest_of("\n".join(sorted(points)))


def digest_of(text: str) -> str:
    """The first 16 digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
