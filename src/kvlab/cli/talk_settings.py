"""What commands that talk share: their arguments, and a model for one conversation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlab.core import SamplingParams
from kvlab.errors import ConfigError

if TYPE_CHECKING:
    from kvlab.config import RunConfig

_SETTING = re.compile(r"[~+]*[A-Za-z_][\w./@-]*=")
#: Where the command line says nothing else: the published model, and memory for one sequence.
_DEFAULTS = {"model": "smollm2_135m", "scheduler.max_batch_size": "1", "tracking": "off"}
MAX_TOKENS = 256


def split(arguments: Sequence[str]) -> tuple[list[str], str]:
    """The settings of a run, and the words."""
    settings = [argument for argument in arguments if _SETTING.match(argument)]
    return settings, " ".join(argument for argument in arguments if not _SETTING.match(argument))


def talking_config(overrides: Sequence[str], command: str) -> RunConfig:
    """The configuration of a conversation. Raises ConfigError with Hydra's reason."""
    from kvlab.cli.compose import compose_one

    given = {override.partition("=")[0].lstrip("+~") for override in overrides}
    defaults = [f"{key}={value}" for key, value in _DEFAULTS.items() if key not in given]
    return compose_one([*defaults, *overrides], command)


def sampling_of(max_tokens: int, temperature: float, seed: int) -> SamplingParams:
    """How tokens are picked. Raises ConfigError."""
    if max_tokens < 1:
        raise ConfigError("max_tokens", max_tokens, "must be at least 1")
    if not 0 <= temperature <= 100:
        raise ConfigError("temperature", temperature, "must be a number from 0 (greedy) to 100")
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
