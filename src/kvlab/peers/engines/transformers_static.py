"""transformers' generate on padded batches, one after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.peers.engines import ENGINES
from kvlab.peers.engines.base import Assignment, EngineKind
from kvlab.peers.install import Recipe
from kvlab.peers.process import ProcessEngine, Program, check_settings

if TYPE_CHECKING:
    from kvlab.config import RunConfig
    from kvlab.engine.protocol import ServingEngine

_PROGRAM = Program("transformers_static", "transformers_engines.py", "static", "transformers", greedy_only=True)


@ENGINES.register("transformers_static")
class Static(EngineKind):
    """transformers' generate on padded batches, one after another."""

    recipe = Recipe("transformers", "5.23.0", before=("torch==2.13.0",))

    @staticmethod
    def check(config: RunConfig) -> None:
        check_settings(config, _PROGRAM)

    @staticmethod
    def start(assignment: Assignment) -> ServingEngine:
        return ProcessEngine(_PROGRAM, assignment)
