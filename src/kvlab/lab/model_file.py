"""Whether a model's config.json says what its memory depends on.

Defaults fill in what a file leaves out; where no weights are read, the figures would be those of another model.
"""

from pathlib import Path

from kvlab.errors import ConfigError
from kvlab.models.families import FAMILIES
from kvlab.models.files import read_object

_NEEDED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip
# What a published file of a family may leave out, because the family has a rule for it or one value only.
_OPTIONAL = {
    "llama": {"num_key_value_heads", "head_dim"},
    "qwen2": {"head_dim"},
    "gemma3": {"vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"},
}


def check_model_file(path: Path) -> None:
    """Raise ConfigError where a config.json is no model's, or leaves out a key that the memory depends on."""
    try:
        values = read_object(path)
    except ValueError as error:
        raise ConfigError("model", path, str(error)) from error
    family = values.get("model_type")
    if not isinstance(family, str):
        raise ConfigError("model", path, "has no model_type, so it is not a model's config.json")
    text, where = values, ""
    if family == "gemma3":  # of which a file that has no object there leaves out everything
        text, where = (inner if isinstance(inner := values.get("text_config"), dict) else {}), "text_config of "
    if family in FAMILIES:
        missing = [key for key in _NEEDED if text.get(key) is None and key not in _OPTIONAL.get(family, ())]
    else:
        from kvlab.models.transformers_plan import left_out

        missing = left_out(values, _NEEDED)
    if missing:
        raise ConfigError("model", path, f"{where}this {family} leaves out {', '.join(missing)}; add what it has")
