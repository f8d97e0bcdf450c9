"""kvlab generate: one answer, word by word.

kvlab generate "Why is the sky blue?"                      SmolLM2 135M (kvlab fetch smollm2)
kvlab generate model=checkpoint model.path=model.gguf "Write a haiku about rain." temperature=0.8
echo "Once upon a time" | kvlab generate raw=true max_tokens=40

The words are the message to a model with a chat template, else the text that it continues; without any they are
read from standard input. The answer goes to standard output, its speed and memory to standard error. Any setting of
`kvlab run` may follow.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from kvlab.cli.settings import command, setting
from kvlab.cli.talk_settings import MAX_TOKENS, sampling_of, split, talking_config
from kvlab.errors import ConfigError


@dataclass
class GenerateSettings:
    """What the command takes beside the settings of a run."""

    prompt: str | None = setting(None, "the words, where they look like a setting", "TEXT")
    system: str | None = setting(None, "a system prompt", "TEXT")
    raw: bool = setting(False, "continue the text, without chat template; or --raw", "true")
    max_tokens: int = setting(MAX_TOKENS, "most tokens of the answer", "N")
    temperature: float = setting(0.0, "of sampling; 0: greedy", "X")


@command(__doc__, GenerateSettings)
def main(settings: GenerateSettings, others: list[str]) -> int:
    overrides, words = split(others)
    config = talking_config(overrides, "an answer")
    sampling = sampling_of(settings.max_tokens, settings.temperature, config.seed)
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
        spoken = speaker.answer(ids, sampling, write, should_stop)
    print(flush=True)
    print(f"[{spoken.speed}]", file=sys.stderr)
    return 130 if should_stop() else 0


def write(text: str) -> None:
    """Show words at once."""
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
