"""A server on a free port, in a thread, with a tiny model whose words are its token ids."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvlab.config.server import ServerConfig
from kvlab.core import Message
from kvlab.engine.clock import WallClock
from kvlab.engine.service import Engine
from kvlab.errors import ConfigError
from kvlab.models.tokenizer import Tokenizer
from kvlab.server.app import build_app
from kvlab.server.lifecycle import Server, listen
from kvlab.server.metrics import ServerMetrics
from kvlab.server.model import ServedModel
from kvlab.server.serving import Serving
from tests.support.engines import make_engine
from tests.support.model import tiny_config


class Letters(Tokenizer):
    """Token 97 is "a": the characters of a text are its ids."""

    def __init__(self) -> None:
        """Nothing is read."""

    @property
    def has_template(self) -> bool:
        return True

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 199 for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def encode_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        if any(message.role == "robot" for message in prompt):
            raise ConfigError("messages", "robot", "the template knows no such role")
        return [id_ for role, content in prompt for id_ in self.encode(f"{role}: {content}\n")]


@dataclass
class Served:
    """A server that runs."""

    url: str
    serving: Serving
    server: Server


@contextmanager
def served(*, words: bool = True, config: ServerConfig | None = None, **engine: Any) -> Iterator[Served]:
    """A server with an engine of these settings; it has ended, with all memory free, when the block is left."""
    config = config or ServerConfig(port=0)
    tokenizer = Letters() if words else None
    vocab = tiny_config().vocab_size
    core = make_engine(
        clock=WallClock(), vocab_size=vocab, detokenize=tokenizer.decode if tokenizer else None, **engine
    )
    metrics = ServerMetrics("tiny")
    service = Engine(core, on_step=metrics.step)
    model = ServedModel("tiny", core.pool.max_sequence_tokens, vocab, int(time.time()), tokenizer)
    serving = Serving(service, model, metrics, config)
    listening = listen(config)
    server = Server(build_app(serving), serving)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield Served("http://{}:{}".format(*listening.getsockname()[:2]), serving, server)
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
        assert not thread.is_alive()
