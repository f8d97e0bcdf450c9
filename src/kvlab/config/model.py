"""The model: its architecture and where its weights come from."""

from dataclasses import dataclass, field
from typing import Any

from kvlab.config.values import at_least, one_of
from kvlab.errors import ConfigError

IMPLEMENTATIONS = ("auto", "kvlab", "transformers")


@dataclass
class ModelConfig:
    """A decoder: its architecture and where its weights come from."""

    name: str = "???"  # what the model is called in tables and runs
    family: str | None = "qwen3"  # transformers' model_type; null: read from path
    architecture: dict[str, Any] = field(default_factory=dict)  # values of config.json, as num_hidden_layers: 8
    path: str | None = None  # a directory or hub id that holds config.json (and weights), or a GGUF file
    weights: str | None = "dummy"  # dummy: random; or a directory, hub id or GGUF file; null: those of path
    tokenizer: str | None = None  # a directory, hub id or GGUF file with one, for a model that has none of its own
    implementation: str = "auto"  # kvlab's decoder or transformers'; auto: kvlab's where it knows the family
    max_seq_len: int = 1024  # longest sequence that is served, in tokens, prompt and output together

    def __post_init__(self) -> None:
        one_of("model.implementation", self.implementation, IMPLEMENTATIONS)
        at_least("model.max_seq_len", self.max_seq_len, 1)
        if self.family is None and self.path is None:
            raise ConfigError(
                "model.path", self.path, "model=checkpoint needs model.path=<directory, hub id or GGUF file>"
            )
        if self.weights is None:
            if self.path is None:
                raise ConfigError("model.weights", None, "needs model.path, or weights of its own")
            self.weights = self.path
