"""kvlab's own engine, the default."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from kvlab.peers.engines import ENGINES
from kvlab.peers.engines.base import Assignment, EngineKind

if TYPE_CHECKING:
    from kvlab.config import RunConfig


@ENGINES.register("kvlab")
class OwnEngine(EngineKind):
    """No peer: the laboratory plans and builds it."""

    is_peer = False

    @staticmethod
    def check(config: RunConfig) -> None:
        pass

    @staticmethod
    def start(assignment: Assignment) -> NoReturn:
        raise RuntimeError("kvlab's own engine is built by the laboratory")
