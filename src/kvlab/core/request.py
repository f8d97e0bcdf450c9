"""What a user asks for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvlab.hashed_prompt import TokenIds


class GrammarState(Protocol):
    """Where an output stands in its grammar."""

    def allowed(self, output: Sequence[int]) -> NDArray[np.bool_] | None:
        """Of each token of the vocabulary whether it may follow this output, which need not be longer than that of
        the call before; None: the output does not follow the grammar. The array is the caller's.

        Raises GrammarError where it is too complex.
        """


class Grammar(Protocol):
    """What an output has to follow; see `kvlab.models.grammars`."""

    def start(self) -> GrammarState:
        """For one output."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are picked, and when to stop.

    `temperature` 0 is greedy. With `seed`, a sampled request's tokens depend on nothing but the request and how its
    logits are rounded. `n` samples are drawn of one prompt, which is computed once. The order is bias, repetition
    penalty, penalties for presence and frequency, masks (all but the allowed tokens, the last tokens of bad words
    that the output has begun, stop tokens below `min_tokens`), temperature, `top_k`, `top_p`, `min_p`. The output's
    text, where the engine has a detokenizer, ends before the first of the `stop` strings.

    A `grammar` masks what may not follow the output, before the other masks; where these leave none of its tokens,
    they do not count. It says, too, where the output may end: with a token that ends a sequence.
    """

    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    top_k: int = 0  # only the k most likely tokens; 0: all
    top_p: float = 1.0  # only the most likely tokens that together have this probability (Holtzman et al., 2020)
    min_p: float = 0.0  # only tokens at least this often as likely as the most likely (Nguyen et al., 2024)
    repetition_penalty: float = 1.0  # of tokens in prompt or output; above 1 discourages (Keskar et al., 2019)
    presence_penalty: float = 0.0  # taken once from the logit of each token in the output
    frequency_penalty: float = 0.0  # taken from it as often as the token is in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # tokens and what is added to their logits
    logprobs: int | None = None  # how many alternatives to report with each token's log-probability
    prompt_logprobs: int | None = None  # the same of the prompt's tokens, which are all computed then
    min_tokens: int = 0  # before that many, stop tokens are not sampled and stop strings do not stop
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # the stop string that ended the output is part of its text
    skip_special_tokens: bool = True  # special tokens, such as an end of sequence, have no text
    allowed_token_ids: tuple[int, ...] = ()  # only these are sampled; none: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids that never come one after another in the output
    grammar: Grammar | None = None


#: Fields of it that change how likely a token is to be picked, and by which random numbers.
PICKING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


class Message(NamedTuple):
    """A part of a conversation. Roles are what the checkpoint's chat template knows: system, user, assistant."""

    role: str
    content: str
    fields: dict[str, Any] | None = None  # what else a template may read, such as tool_calls


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for. `arrival_s` is in seconds on the engine's clock. Prompts share memory only under the
    same `salt`. The first `pin_tokens` of the prompt are to stay cached, as far as the pool pins any. Under
    scheduler.order=priority the lowest `priority` goes first, under deadline the request that has to be complete
    first: `deadline_s` seconds after its arrival (None: scheduler.default_deadline_s).

    A request that `follows` another is the next turn of a conversation: `prompt_token_ids` come behind the
    other's prompt and output, and `arrival_s` counts from the other's end. Who drives the engine puts it together.

    `prompt` is what a user wrote, if one did: who makes requests turns it into tokens, and engines do not read it.

    `output_tokens` is how many tokens a recorded request produced that asked for up to `max_tokens`: its output
    ends there, and no scheduler knows of it before.
    """

    request_id: str
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    arrival_s: float = 0.0
    salt: str | int | None = None
    follows: str | None = None
    priority: int = 0
    deadline_s: float | None = None
    prompt: str | tuple[Message, ...] | None = None
    pin_tokens: int = 0
    output_tokens: int | None = None

    @property
    def prompt_text(self) -> str:
        """What a user wrote; of messages the last."""
        prompt = self.prompt or ""
        return prompt if isinstance(prompt, str) else prompt[-1].content

    @property
    def expected_tokens(self) -> int:
        """Tokens of its output unless it stops earlier: `output_tokens`, at most `max_tokens`."""
        most = self.sampling.max_tokens
        return most if self.output_tokens is None else min(self.output_tokens, most)

    @property
    def max_total_tokens(self) -> int:
        """The most tokens the request can grow to, prompt included."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens
