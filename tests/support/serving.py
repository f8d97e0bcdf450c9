"""Servers on a free port, in a thread: of any engine, or of a tiny model whose words are its token ids."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvlab.config.server import ServerConfig
from kvlab.core import Message, StepRecord
from kvlab.engine.clock import WallClock
from kvlab.engine.core import EngineCore
from kvlab.engine.service import Engine
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.errors import ConfigError
from kvlab.kv.view import CacheView
from kvlab.models.chat_template import AS_USUAL, Rendering
from kvlab.models.grammars import Grammars
from kvlab.models.tokenizer import Tokenizer
from kvlab.server.app import build_app
from kvlab.server.lifecycle import Server, listen
from kvlab.server.metrics import ServerMetrics
from kvlab.server.model import ServedModel
from kvlab.server.serving import Serving
from tests.support.engines import assert_empty, make_engine
from tests.support.model import tiny_config


class Letters(Tokenizer):
    """Token 97 is "a": the characters of a text are its ids."""

    def __init__(self) -> None:
        """Nothing is read."""
        self.source = "letters"

    @property
    def has_template(self) -> bool:
        return True

    def info(self) -> dict[str, str | None]:
        return {"chat_template": "letters"}

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 199 for character in text]

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        return "".join(map(chr, token_ids))

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text)

    def render(self, messages: Sequence[Message], how: Rendering = AS_USUAL) -> str:
        if any(message.role == "function" for message in messages):
            raise ConfigError("messages", "function", "the template knows no such role")
        return "".join(f"{message.role}: {message.content}\n" for message in messages)


@dataclass
class Served:
    """A server that runs."""

    url: str
    serving: Serving
    server: Server


class PacedExecutor:
    """Another executor, each pass of which takes at least `least_s` seconds: long enough to act in between."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._least_s = 0.0
        self._changed = threading.Event()

    @property
    def least_s(self) -> float:
        """Setting it ends the wait of the pass that runs."""
        return self._least_s

    @least_s.setter
    def least_s(self, seconds: float) -> None:
        self._least_s = seconds
        self._changed.set()

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        """See Executor."""
        self._changed.clear()
        if self._least_s:
            self._changed.wait(self._least_s)
        return self._inner.execute(step, view)


@contextmanager
def served(*, words: bool = True, config: ServerConfig | None = None, **engine: Any) -> Iterator[Served]:
    """A server with an engine of these settings; it has ended, with all memory free, when the block is left."""
    tokenizer = Letters() if words else None
    detokenize = tokenizer.decode if tokenizer else None
    core = make_engine(clock=WallClock(), vocab_size=tiny_config().vocab_size, detokenize=detokenize, **engine)
    with running(serving_of(core, "tiny", tiny_config().vocab_size, tokenizer, config)) as found:
        yield found


def serving_of(
    core: EngineCore,
    name: str,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    config: ServerConfig | None = None,
    records: list[StepRecord] | None = None,
    grammars: Grammars | None = None,
) -> Serving:
    """What a server of this engine shares; without a `config` it listens on any free port. Each step's record is
    added to `records`.
    """
    metrics = ServerMetrics(name)

    def on_step(record: StepRecord) -> None:
        metrics.step(record)
        if records is not None:
            records.append(record)

    longest, now = core.pool.max_sequence_tokens, int(time.time())
    model = ServedModel(name, longest, vocab_size, now, tokenizer, grammars=grammars)
    return Serving(Engine(core, on_step=on_step), model, metrics, config or ServerConfig(port=0))


@contextmanager
def running(serving: Serving) -> Iterator[Served]:
    """Its server, which has ended when the block is left."""
    listening = listen(serving.config)
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


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Fails where it does not come true."""
    latest = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < latest
        time.sleep(0.002)


def wait_until_empty(serving: Serving, seconds: float = 30) -> None:
    """Memory of requests that have ended comes back with the engine's next step."""
    wait_until(lambda: not serving.engine.has_work(), seconds)
    serving.engine.inspect(assert_empty).result(seconds)  # between two steps: in one, blocks are on their way back
