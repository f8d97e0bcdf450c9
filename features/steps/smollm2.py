"""A server of SmolLM2 and what its clients were answered."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import openai

from kvlab.cli.compose import compose_run
from kvlab.core import StepRecord
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.step import Executor
from kvlab.models.tokenizer import load_tokenizer
from kvlab.server.serving import Serving
from tests.support.published import smollm2_file
from tests.support.serving import PacedExecutor, Served, running, serving_of, wait_until, wait_until_empty

#: As few threads, and as small a pool, as the scenarios need.
SETTINGS = (
    "model=smollm2_135m",
    "model.max_seq_len=512",
    "executor=cpu",
    "executor.dtype=bfloat16",
    "executor.threads=1",
    "kv.num_blocks=160",
    "scheduler.order=priority",
    "scheduler.max_batch_size=8",
    "scheduler.max_waiting_requests=8",
)


@dataclass
class Reply:
    """What a client got, in whole or chunk by chunk; of a stream the chunks' texts are joined."""

    texts: dict[int, str] = field(default_factory=dict)  # of each choice
    reasons: dict[int, list[str]] = field(default_factory=dict)
    choices: list[Any] = field(default_factory=list)
    chunks: list[Any] = field(default_factory=list)
    usage: Any = None

    @property
    def text(self) -> str:
        """Of the only choice."""
        (text,) = self.texts.values()
        return text

    @property
    def pieces(self) -> list[str]:
        """The text of each chunk that has a choice."""
        return [_text(choice) for chunk in self.chunks for choice in chunk.choices]

    def take(self, answer: Any) -> None:
        """A whole answer, or one more chunk."""
        self.usage = answer.usage or self.usage
        self.choices += answer.choices
        for choice in answer.choices:
            self.texts[choice.index] = self.texts.get(choice.index, "") + _text(choice)
            reasons = self.reasons.setdefault(choice.index, [])
            reasons += [choice.finish_reason] if choice.finish_reason else []


def _text(choice: Any) -> str:
    said = getattr(choice, "message", None) or getattr(choice, "delta", None)
    text = choice.text if said is None else said.content
    assert isinstance(text, str) or (said is not None and said.tool_calls) or choice.finish_reason
    return text or ""


class Client:
    """OpenAI's own client of a server."""

    def __init__(self, served: Served, *, key: str = "none", max_retries: int = 0) -> None:
        self.served = served
        self.sdk = openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=max_retries, timeout=60)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.sdk.close()

    def open(self, kind: str, fields: dict[str, Any], **options: Any) -> Any:
        """Ask for a completion or a chat, greedy unless the fields say otherwise."""
        create: Any = self.sdk.completions.create if kind == "completion" else self.sdk.chat.completions.create
        fields = {"model": "smollm2_135m", "temperature": 0} | fields
        known = inspect.signature(create).parameters
        extra = {name: value for name, value in fields.items() if name not in known}
        own = {name: value for name, value in fields.items() if name in known}
        return create(**own, extra_body=extra, **options)

    def ask(self, kind: str, fields: dict[str, Any]) -> Reply:
        """The whole answer, streamed if the fields say so."""
        reply, answer = Reply(), self.open(kind, fields)
        if not fields.get("stream"):
            reply.take(answer)
            return reply
        for chunk in answer:
            reply.chunks.append(chunk)
            reply.take(chunk)
        return reply


@dataclass
class SmolLM2:
    """The engine, with one server; other servers of it have other limits."""

    serving: Serving
    pace: PacedExecutor
    records: list[StepRecord]
    client: Client

    @property
    def blocks_in_use(self) -> int:
        """Blocks that sequences hold."""
        return self.serving.engine.core.pool.stats().blocks_in_use

    def settle(self) -> None:
        """Wait until nothing is left, and check that nothing was leaked."""
        self.pace.least_s = 0
        wait_until_empty(self.serving)
        wait_until(lambda: not self.serving.open_calls)


@contextmanager
def smollm2_server() -> Iterator[SmolLM2]:
    """Skips, with the reason, where SmolLM2 cannot be had."""
    smollm2_file()
    config = compose_run(SETTINGS).config
    plan, tokenizer = plan_engine(config), load_tokenizer(config.model)
    paces: list[PacedExecutor] = []

    def paced(executor: Executor) -> Executor:
        paces.append(PacedExecutor(executor))
        return paces[0]

    written = partial(tokenizer.decode, special=True)
    core = build_engine(plan, detokenize=tokenizer.decode, detokenize_all=written, wrap=paced)
    records: list[StepRecord] = []
    vocab_size, grammars = (
        plan.model.vocab_size,
        tokenizer.grammars(plan.model.vocab_size, plan.model.eos_token_ids),
    )
    serving = serving_of(core, config.model.name, vocab_size, tokenizer, records=records, grammars=grammars)
    with ExitStack() as stack:
        client = stack.enter_context(Client(stack.enter_context(running(serving))))
        yield SmolLM2(serving, paces[0], records, client)
