"""What a choice of `engine.kind` is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlab.config import RunConfig
    from kvlab.core import Request
    from kvlab.engine.protocol import ServingEngine
    from kvlab.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Recipe:
    """A package and what it needs. `before` is installed first; of the package's own requirements those whose names
    begin with one of `left_out` are not installed. One that `is_built` comes as source, for this processor.
    """

    package: str
    version: str
    before: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    is_built: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """What an engine other than kvlab's is to serve."""

    config: RunConfig
    model: DecoderConfig
    requests: Sequence[Request]
    longest: int  # tokens of the longest sequence that one of them can grow to
    directory: Path  # where what it prints is kept
    should_stop: Callable[[], bool] = lambda: False  # asked while it starts


class EngineKind(ABC):
    """A kind of engines. kvlab's own is built by the laboratory; every other is a peer and starts itself."""

    is_peer = True
    recipe: Recipe | None = None  # of an environment of its own

    @staticmethod
    @abstractmethod
    def check(config: RunConfig) -> None:
        """Raise ConfigError for settings that the engine does not support. Starts nothing."""

    @staticmethod
    @abstractmethod
    def start(assignment: Assignment) -> ServingEngine:
        """The engine, loaded and warm, with nothing in its prefix cache that a request could find.

        Raises PeerError, with nothing left running.
        """
