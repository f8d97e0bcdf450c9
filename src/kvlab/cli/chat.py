"""kvlab chat: talk to a model; the KV cache of the conversation is kept from turn to turn.

kvlab chat                                     with SmolLM2 135M (kvlab fetch smollm2)
kvlab chat model=checkpoint model.path=/models/llama system="Answer in one sentence." temperature=0.7
printf 'Hello!\\nWhat did I say?\\n' | kvlab chat

After each answer a line says what of the prompt was found in the prefix cache. Ctrl-C ends an answer, or, at the
prompt, the chat, as does the end of the input; /new begins another conversation. Any setting of `kvlab run` may
follow.
"""

import sys

from kvlab.cli.generate import TalkSettings, split, talking_config, write
from kvlab.cli.settings import command
from kvlab.errors import ConfigError, KvlabError

_PROMPT = "> "


@command(__doc__, TalkSettings)
def main(settings: TalkSettings, others: list[str]) -> int:
    overrides, words = split(others)
    if words:
        raise ConfigError("chat", words, f'takes settings alone; ask once with kvlab generate "{words}"')
    config = talking_config(overrides, "a chat")
    sampling = settings.sampling(config.seed)
    # Imported this late so that --help and a mistake answer at once.
    from kvlab.lab.run.interrupt import stop_on_signal
    from kvlab.lab.run.speaker import Speaker
    from kvlab.lab.terminal import Terminal
    from kvlab.models.conversation import Conversation

    speaker = Speaker(config)
    conversation = Conversation(speaker.tokenizer, settings.system)
    conversation.ask("Hello")  # a model without a chat template is refused before the first question
    while (text := _next_message()) is not None:
        if text == "/new":
            conversation = Conversation(speaker.tokenizer, settings.system)
        if text in ("", "/new"):
            continue
        try:
            ids = conversation.ask(text)
            with stop_on_signal(Terminal(quiet=True)) as should_stop:
                spoken = speaker.answer(ids, sampling, write, should_stop)
        except KvlabError as error:  # as a message that is too long; another may do
            print(f"error: {error}", file=sys.stderr)
            continue
        conversation.answered(text, ids, spoken.token_ids)
        print(f"\n[{spoken.found}; {spoken.speed}]", flush=True)
    return 0


def _next_message() -> str | None:
    """What the user says next; None at the end of the input, and on Ctrl-C. What comes from a pipe is shown."""
    try:
        write(_PROMPT)
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        line = ""
    except UnicodeDecodeError as error:
        raise ConfigError("stdin", error.object[:20], "is not UTF-8 text") from error
    if not line:
        print(flush=True)
        return None
    text = line.strip()
    if not sys.stdin.isatty():
        print(text, flush=True)
    return text
