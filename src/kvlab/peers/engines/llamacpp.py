"""llama.cpp, in a process of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.errors import ConfigError, OutputError
from kvlab.peers.engines import ENGINES
from kvlab.peers.engines.base import Assignment, Recipe
from kvlab.peers.process import ProcessEngine, ProcessKind
from kvlab.peers.process_settings import Program

if TYPE_CHECKING:
    from kvlab.config import RunConfig

_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@ENGINES.register("llamacpp")
class LlamaCpp(ProcessKind):
    """llama.cpp's batched decode, of a GGUF file that is written for it."""

    recipe = Recipe("llama-cpp-python", "0.3.36", is_built=True)
    program = Program(
        "llamacpp", "llamacpp_engine.py", "LlamaCpp", "llama_cpp", greedy_only=True, counts=True, reads_gguf=True
    )

    @classmethod
    def check(cls, config: RunConfig) -> None:
        super().check(config)
        from kvlab.models.families import decoder_config
        from kvlab.models.gguf_write import STORED, misfit

        if (stored := _stored(config)) not in STORED:
            raise ConfigError("engine.options.weights", stored, f"unknown; known: {', '.join(STORED)}")
        model = decoder_config(config.model)
        if (reason := misfit(model, stored)) is not None:
            raise ConfigError("model.family", model.family, f"{reason} (engine=llamacpp)")

    @classmethod
    def start(cls, assignment: Assignment) -> ProcessEngine:
        import torch  # this late: it takes a second

        from kvlab.models.gguf_write import write_gguf
        from kvlab.models.weight_sources import open_weights

        config, model = assignment.config, assignment.model
        dtype = getattr(torch, config.executor.dtype)
        where = config.model.weights or "dummy"
        source = open_weights(where, dtype, "cpu", seed=config.seed, norm_weight=model.initial_norm_weight)
        assignment.directory.mkdir(parents=True, exist_ok=True)
        # The process has read the file, or mapped it, when it is ready.
        with tempfile.TemporaryDirectory(prefix="model-", dir=assignment.directory) as folder:
            file = Path(folder, "model.gguf")
            try:
                write_gguf(model, source, file, _stored(config))
            except OSError as error:
                raise OutputError(file, f"the model cannot be written for llama.cpp ({error.strerror})") from error
            return ProcessEngine(cls.program, assignment, file)


def _stored(config: RunConfig) -> str:
    return str(config.engine.options.get("weights", _TYPES[config.executor.dtype]))
