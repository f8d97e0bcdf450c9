"""kvlab generate: one answer, word by word.

kvlab generate "Why is the sky blue?"                      SmolLM2 135M (kvlab fetch smollm2)
kvlab generate model=checkpoint model.path=model.gguf "Write a haiku about rain." temperature=0.8
echo "Once upon a time" | kvlab generate raw=true max_tokens=40

The words are the message to a model with a chat template, else the text that it continues; without any they are
read from standard input. The answer goes to standard output, its speed and memory to standard error. Any setting of
`kvlab run` may follow.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlab.cli.settings import command, setting
from kvlab.config.values import at_least
from kvlab.core import SamplingParams
from kvlab.errors import ConfigError

if TYPE_CHECKING:
    from kvlab.config import RunConfig

_SETTING = re.compile(r"[~+]*[A-Za-z_][\w./@-]*=")
#: Where the command line says nothing else: the published model, and memory for one sequence.
_DEFAULTS = {"model": "smollm2_135m", "scheduler.max_batch_size": "1", "tracking": "off"}


@dataclass
class TalkSettings:
    """What a conversation takes beside the settings of a run."""

    system: str | None = setting(None, "a system prompt", "TEXT")
    max_tokens: int = setting(256, "most tokens of an answer", "N")
    temperature: float = setting(0.0, "of sampling; 0: greedy", "X")

    def __post_init__(self) -> None:
        at_least("max_tokens", self.max_tokens, 1)
        if not 0 <= self.temperature <= 100:
            raise ConfigError("temperature", self.temperature, "must be a number from 0 (greedy) to 100")

    def sampling(self, seed: int) -> SamplingParams:
        """How tokens are picked."""
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=seed)


@dataclass
class GenerateSettings(TalkSettings):
    """And one answer."""

    prompt: str | None = setting(None, "the words, where they look like a setting", "TEXT")
    raw: bool = setting(False, "continue the text, without chat template; or --raw", "true")


@command(__doc__, GenerateSettings)
def main(settings: GenerateSettings, others: list[str]) -> int:
    overrides, words = split(others)
    config = talking_config(overrides, "an answer")
    prompt = settings.prompt or words
    if not prompt and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
    if not prompt:
        raise ConfigError("prompt", None, 'give the words: kvlab generate "Why is the sky blue?"')
    # Imported this late so that --help and a mistake answer at once.
    from kvlab.lab.run.interrupt import stop_on_signal
    from kvlab.lab.run.speaker import Speaker
    from kvlab.lab.terminal import Terminal
    from kvlab.models.conversation import Conversation

    speaker = Speaker(config)
    tokenizer = speaker.tokenizer
    if settings.raw or not tokenizer.has_template:
        if settings.system:
            raise ConfigError("system", settings.system, "needs a chat template; leave it out, and raw=true too")
        ids = tokenizer.encode(prompt)
    else:
        ids = Conversation(tokenizer, settings.system).ask(prompt)
    with stop_on_signal(Terminal(quiet=True)) as should_stop:
        spoken = speaker.answer(ids, settings.sampling(config.seed), write, should_stop)
    print(flush=True)
    print(f"[{spoken.speed}]", file=sys.stderr)
    return 130 if should_stop() else 0


def write(text: str) -> None:
    """Show words at once."""
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


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
