"""What an engine in a process of its own is, and what of a run's settings it is told."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.config import ModelConfig, RunConfig
from kvlab.errors import ConfigError
from kvlab.kv.sizing import size_pool
from kvlab.models.hub import HubError, hub_folder
from kvlab.peers.engines.base import Assignment
from kvlab.peers.install import installed_python


class Program(NamedTuple):
    """What runs in the process."""

    name: str  # of the engine, as it is chosen
    file: str  # of kvlab.peers.programs
    kind: str  # the class in it
    package: str  # that its environment needs
    greedy_only: bool = False
    counts: bool = False  # it says of each request how much was cached, and when it was admitted
    reads_gguf: bool = False  # kvlab writes it the model as a GGUF file


def check_settings(config: RunConfig, program: Program) -> None:
    """Raise ConfigError for settings that such an engine does not support."""
    interpreter(config.engine.python, program)
    model = config.model
    for key, path in (("model.path", model.path), ("model.weights", model.weights)):
        if path is not None and not program.reads_gguf and (path.startswith("fetched:") or path.endswith(".gguf")):
            raise ConfigError(
                key, path, f"is no checkpoint that engine={program.name} reads: give a directory of one"
            )
    if program.greedy_only and config.workload.temperature > 0:
        text = f"engine={program.name} is greedy alone; use workload.temperature=0"
        raise ConfigError("workload.temperature", config.workload.temperature, text)
    if config.workload.samples > 1:
        text = f"engine={program.name} draws one sample of each prompt; use workload.samples=1"
        raise ConfigError("workload.samples", config.workload.samples, text)
    kv = config.kv
    for key, value in (("dtype", kv.dtype), ("key_dtype", kv.key_dtype), ("value_dtype", kv.value_dtype)):
        if value not in ("auto", None):
            raise ConfigError(f"kv.{key}", value, f"engine={program.name} stores K and V in executor.dtype")


def interpreter(asked: str | None, program: Program) -> str:
    """The interpreter of the engine's environment: the one that is `asked` for, that of the environment that was
    installed for it, or kvlab's own. Raises ConfigError where there is none.
    """
    if asked is None:
        return str(installed_python(program.name) or sys.executable)
    python = shutil.which(os.path.expanduser(asked))
    if python is None:
        raise ConfigError("engine.python", asked, "is no interpreter: name the bin/python of an environment")
    return python


def worker_settings(assignment: Assignment, written: Path | None = None) -> dict[str, Any]:
    """What the program is told, with the model's file where one was `written` for it. The bytes of its cache are
    those that kvlab's own pool would have.

    Raises CapacityError or ConfigError.
    """
    config, model = assignment.config, assignment.model
    spec, scheduler = model.kv_spec(config.executor.dtype), config.scheduler
    most, longest = scheduler.max_batch_size, config.model.max_seq_len
    pool = size_pool(config.kv, spec, max_batch_size=most, max_seq_len=longest)
    return {
        "model": {"file": str(written)} if written is not None else _model(config.model),
        "dtype": config.executor.dtype,
        "threads": config.executor.threads,
        "seed": config.seed,
        "kv_bytes": pool.num_bytes,
        "kv_bytes_per_token": spec.bytes_per_token,
        "prefix_caching": config.kv.prefix_sharing,
        "max_seq_len": longest,
        "max_batch_size": most,
        "max_batched_tokens": scheduler.max_batched_tokens,
        "max_wait_ms": scheduler.max_wait_ms,
        "options": dict(config.engine.options),
    }


def _model(model: ModelConfig) -> dict[str, Any]:
    weights = model.weights
    return {
        "family": model.family,
        "architecture": dict(model.architecture),
        "path": _directory("model.path", model.path),
        "weights": None if weights == "dummy" else _directory("model.weights", weights),
    }


def _directory(key: str, path: str | None) -> str | None:
    """The directory of a checkpoint. Raises ConfigError."""
    if path is None or Path(path).expanduser().is_dir():
        return None if path is None else str(Path(path).expanduser().absolute())
    try:
        return str(hub_folder(path, ["*.json", "*.safetensors"]))
    except HubError as error:
        raise ConfigError(key, path, f"is no directory, and the hub gave nothing: {error}") from error
