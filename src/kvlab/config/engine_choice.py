"""The engine that serves a run's requests: kvlab's own, or another that is measured in the same way."""

from dataclasses import dataclass, field
from typing import Any

from kvlab.config.values import MOST_SECONDS, all_at_least, at_least
from kvlab.registry import registry


@dataclass
class EngineChoiceConfig:
    """Which engine serves the requests, and how another than kvlab's own is reached."""

    kind: str = "kvlab"  # kvlab: the engine of the settings below; others are measured in its place
    url: str | None = None  # openai: the server's address, as http://localhost:8000
    model: str | None = None  # openai: the model's name there; null: the only one
    api_key: str | None = None  # openai: the server's key, as '${oc.env:NAME}'
    extensions: bool = True  # openai: ask in vLLM's terms too (ignore_eos, token ids); false: in OpenAI's alone
    max_in_flight: int | None = None  # openai: most requests at once; others wait here, and their wait counts
    timeout_s: float = 600.0  # seconds after which a request, or an engine that says nothing, has failed
    start_timeout_s: float = 1800.0  # seconds that an engine may take to load and compile
    metrics_s: float = 0.5  # openai: seconds between two looks at the server's /metrics
    python: str | None = None  # the interpreter of the engine's own environment; null: the one that runs kvlab
    version: str | None = None  # the only version that will do; null: any
    options: dict[str, Any] = field(default_factory=dict)  # what the engine is given beside, under its own names

    def __post_init__(self) -> None:
        registry("engine.kind").check(self.kind)
        at_least("engine.max_in_flight", self.max_in_flight, 1)
        all_at_least("engine", self, ("timeout_s", "start_timeout_s", "metrics_s"), 0.001, MOST_SECONDS)
