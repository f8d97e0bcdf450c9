"""kvlab: a laboratory for KV-cache memory in LLM serving.

    engine = kvlab.Engine.from_config(kvlab.EngineConfig(model=kvlab.ModelConfig(...)))
    for output in engine.generate(kvlab.Request("hello", prompt_token_ids, kvlab.SamplingParams(max_tokens=16))):
        ...

Importing the package is cheap: torch and mlflow are loaded by the parts that use them. Import it before torch, so
that torch's threads take no time from others while they wait (`kvlab.kernels.openmp`).
"""

if __name__ != "kvlab":  # `src.kvlab`, where the repository's root is on the path
    raise ImportError(f"import kvlab, not {__name__}: as two packages its registries and errors would not match")

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvlab.kernels.openmp import wait_briefly

if TYPE_CHECKING:
    from kvlab.config import AttentionConfig, EngineConfig, ExecutorConfig, KVConfig, ModelConfig, SchedulerConfig
    from kvlab.core import FinishReason, Request, SamplingParams, StepOutput
    from kvlab.engine.service import Engine
    from kvlab.errors import KvlabError

wait_briefly()

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig", "Engine", "EngineConfig", "ExecutorConfig", "FinishReason", "KVConfig", "KvlabError",
    "ModelConfig", "Request", "SamplingParams", "SchedulerConfig", "StepOutput",
]  # fmt: skip

#: Where they are; what takes longer to import comes later.
_HOMES = ("kvlab.errors", "kvlab.core", "kvlab.config", "kvlab.engine.service")


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for."""
    for home in _HOMES if name in __all__ else ():
        if name in (found := vars(import_module(home))):
            return found[name]
    raise AttributeError(f"module 'kvlab' has no attribute {name!r}")
