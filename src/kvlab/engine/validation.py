"""Checks of a request before it is queued. Each error names the parameter, its value and what would work."""

import sys
from collections.abc import Callable
from typing import TypeGuard

from kvlab.core import Request, SamplingParams, limits
from kvlab.engine.scheduler.waiting_queue import WaitingQueue
from kvlab.errors import QueueFullError, RequestRefusedError, TooLongError, shown
from kvlab.hashed_prompt import HashedPrompt

_COUNTS = (
    ("max_tokens", 1, limits.MAX_WHOLE, ""),
    ("n", 1, limits.MAX_SAMPLES, " sample"),
    ("top_k", 0, limits.MAX_WHOLE, "; 0 keeps all tokens"),
    ("min_tokens", 0, limits.MAX_WHOLE, ""),
    ("logprobs", 0, limits.MAX_LOGPROBS, "; 0 reports the sampled tokens alone, None nothing"),
    ("prompt_logprobs", 0, limits.MAX_LOGPROBS, "; 0 reports the prompt's tokens alone, None nothing"),
)

_Rule = tuple[Callable[[float], bool], str]
_PENALTY: _Rule = (
    lambda x: abs(x) <= limits.MAX_PENALTY,
    f"a number from -{limits.MAX_PENALTY} to {limits.MAX_PENALTY}",
)
_NUMBERS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda x: x >= 0, "a number, at least 0; 0 is greedy"),
    ("top_p", lambda x: 0 < x <= 1, "a number in (0, 1]; 1 keeps all tokens"),
    ("min_p", lambda x: 0 <= x < 1, "a number in [0, 1); 0 keeps all tokens"),
    ("repetition_penalty", lambda x: x >= 0.001, "a number, at least 0.001; 1 changes nothing"),
    ("presence_penalty", *_PENALTY),
    ("frequency_penalty", *_PENALTY),
)


def check_request(request: Request, vocab_size: int | None, *, has_text: bool, longest: int) -> None:
    """Raise RequestRefusedError for a request that an engine with this vocabulary, and with room for sequences of
    `longest` tokens, can never serve.
    """
    check_prompt(request, vocab_size)
    check_sampling(request.request_id, request.sampling, vocab_size=vocab_size, has_text=has_text)
    check_urgency(request)
    check_pin(request)
    check_fits(request, longest)


def check_prompt(request: Request, vocab_size: int | None) -> None:
    """Raise RequestRefusedError for a prompt that is empty, or no tokens of this vocabulary (None: any)."""
    prompt, name = request.prompt_token_ids, f"request {request.request_id!r}"
    if isinstance(prompt, HashedPrompt) and prompt.length and prompt.vocab_size <= (vocab_size or limits.MAX_WHOLE):
        return  # without making its tokens
    if not isinstance(prompt, tuple | list | HashedPrompt):
        raise RequestRefusedError(
            f"{name}: prompt_token_ids={shown(prompt, repr)}; must be a tuple of token ids", "prompt"
        )
    if not prompt:
        raise RequestRefusedError(f"{name}: an empty prompt", "prompt")
    if not {int}.issuperset(map(type, prompt)):
        wrong = next(token for token in prompt if type(token) is not int)
        raise RequestRefusedError(f"{name}: token id {shown(wrong, repr)} is no whole number", "prompt")
    low, high = min(prompt), max(prompt)
    if vocab_size is not None and (low < 0 or high >= vocab_size):
        wrong = low if low < 0 else high
        raise RequestRefusedError(
            f"{name}: token id {shown(wrong)} is outside the vocabulary of {vocab_size}", "prompt"
        )


def check_urgency(request: Request) -> None:
    """Raise RequestRefusedError for a priority that is no whole number, or a deadline that is not behind the
    arrival.
    """
    name, priority, seconds = f"request {request.request_id!r}", request.priority, request.deadline_s
    if not _is_whole(priority) or abs(priority) > limits.MAX_WHOLE:
        text = f"must be a whole number from -{limits.MAX_WHOLE} to {limits.MAX_WHOLE}; the lowest goes first"
        raise RequestRefusedError(f"{name}: priority={shown(priority, repr)}; {text}", "priority")
    if seconds is not None and not (_is_number(seconds) and seconds > 0):
        text = "must be seconds, more than 0, or None"
        raise RequestRefusedError(f"{name}: deadline_s={shown(seconds, repr)}; {text}", "deadline_s")


def check_pin(request: Request) -> None:
    """Raise RequestRefusedError for a number of tokens to pin that is not one of the prompt's, which the next turn
    of a conversation does not know yet.
    """
    pinned = request.pin_tokens
    most = len(request.prompt_token_ids) if request.follows is None else limits.MAX_WHOLE
    if not _is_whole(pinned) or not 0 <= pinned <= most:
        text = f"must be a whole number of the prompt's first tokens, from 0 to {most}"
        name = f"request {request.request_id!r}"
        raise RequestRefusedError(f"{name}: pin_tokens={shown(pinned, repr)}; {text}", "pin_tokens")


def check_fits(request: Request, most: int) -> None:
    """Raise TooLongError for a request that can grow to more than `most` tokens, those of the largest
    sequence that fits.
    """
    prompt, output = len(request.prompt_token_ids), request.sampling.max_tokens
    if prompt + output > most:
        would = f"max_tokens={most - prompt}" if prompt < most else f"a prompt of up to {most - 1} tokens"
        raise TooLongError(
            f"request {request.request_id!r}: {prompt} prompt tokens + {output} output tokens can never fit; the "
            f"pool takes sequences of up to {most} tokens; {would} would fit",
            "max_tokens" if prompt < most else "prompt",
            most,
        )


def check_prompt_fits(request: Request, most: int | None) -> None:
    """Raise TooLongError for a prompt of more than `most` tokens, those of a step that takes it whole."""
    tokens = len(request.prompt_token_ids)
    if most is not None and tokens > most:
        raise TooLongError(
            f"request {request.request_id!r}: {tokens} prompt tokens are more than the {most} of a step, and "
            "scheduler.chunk_unit has none compute a part of a prompt; set a smaller unit, or more "
            "scheduler.max_batched_tokens",
            "prompt",
            most,
        )


def check_queue(request: Request, queue: WaitingQueue, most: int | None) -> None:
    """Raise QueueFullError where as many requests wait as may; samples of one request count once."""
    if most is None or len(queue) < most:
        return
    waiting = len({sequence.request.request_id for sequence in queue})
    if waiting >= most:
        raise QueueFullError(
            f"request {request.request_id!r}: {waiting} requests are waiting, and "
            f"scheduler.max_waiting_requests={most} allows no more"
        )


def check_sampling(request_id: str, sampling: SamplingParams, *, vocab_size: int | None, has_text: bool) -> None:
    """Raise RequestRefusedError, naming the parameter, its value and what would do. `has_text`: the engine has a
    detokenizer.
    """
    wrong = _first_wrong(sampling, vocab_size, has_text)
    if wrong is not None:
        name, advice = wrong
        value = shown(getattr(sampling, name), repr)
        raise RequestRefusedError(f"request {request_id!r}: {name}={value}; {advice}", name)


def _first_wrong(sampling: SamplingParams, vocab_size: int | None, has_text: bool) -> tuple[str, str] | None:
    """A parameter that will not do and what would."""
    for name, least, most, unit in _COUNTS:
        value = getattr(sampling, name)
        if name in ("logprobs", "prompt_logprobs") and value is None:
            continue
        if not _is_whole(value):
            return name, "must be a whole number"
        if not least <= value <= most:
            return name, f"at least {least}{unit}" if value < least else f"at most {most}"
    for name, holds, advice in _NUMBERS:
        value = getattr(sampling, name)
        if not (_is_number(value) and holds(value)):
            return name, advice
        if value > limits.MAX_TEMPERATURE:
            return name, f"at most {limits.MAX_TEMPERATURE:.0e}"
    if sampling.seed is not None and not _is_whole(sampling.seed):
        return "seed", "must be a whole number, or None for a new one"
    for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
        if getattr(sampling, name) not in (True, False):
            return name, "must be true or false"
    if sampling.grammar is not None and sampling.ignore_eos:
        return "ignore_eos", "the grammar says where the output ends; leave it out"
    if sampling.min_tokens > sampling.max_tokens:
        return "min_tokens", f"at most max_tokens={sampling.max_tokens}"
    stops, limit = sampling.stop, limits.MAX_WHOLE if vocab_size is None else vocab_size
    if (wrong := _wrong_ids(sampling.stop_token_ids, limits.MAX_STOP_TOKENS, limit)) is not None:
        return "stop_token_ids", wrong
    if not isinstance(stops, tuple) or not all(isinstance(text, str) and text for text in stops):
        return "stop", "must be a tuple of strings, none of them empty"
    if (wrong := _wrong_bias(sampling.logit_bias, limit)) is not None:
        return "logit_bias", wrong
    if (wrong_tokens := _wrong_tokens(sampling, limit)) is not None:
        return wrong_tokens
    if len(stops) > limits.MAX_STOPS:
        return "stop", f"has {len(stops)} strings; at most {limits.MAX_STOPS}"
    if (longest := max(map(len, stops), default=0)) > limits.MAX_STOP_CHARS:
        return "stop", f"has a string of {longest:,} characters; at most {limits.MAX_STOP_CHARS}"
    if sampling.stop and not has_text:
        return "stop", "needs text: give the engine a detokenizer, or use stop_token_ids"
    return None


def _wrong_tokens(sampling: SamplingParams, vocab_size: int) -> tuple[str, str] | None:
    """Which of the allowed tokens and the bad words will not do, and what would."""
    allowed, words = sampling.allowed_token_ids, sampling.bad_words
    if (wrong := _wrong_ids(allowed, limits.MAX_ALLOWED, vocab_size)) is not None:
        return "allowed_token_ids", wrong
    if not isinstance(words, tuple) or not all(isinstance(word, tuple) and word for word in words):
        return "bad_words", "must be a tuple of tuples of token ids, none of them empty"
    if len(words) > limits.MAX_BAD_WORDS:
        return "bad_words", f"has {len(words)} words; at most {limits.MAX_BAD_WORDS}"
    if (longest := max(map(len, words), default=0)) > limits.MAX_BAD_WORD_TOKENS:
        return "bad_words", f"has a word of {longest} tokens; at most {limits.MAX_BAD_WORD_TOKENS}"
    if not all(_is_whole(token) and 0 <= token < vocab_size for word in words for token in word):
        return "bad_words", f"token ids must be from 0 to below {vocab_size}"
    if allowed and set(allowed) <= {word[0] for word in words if len(word) == 1}:
        return "bad_words", "leaves none of allowed_token_ids"
    return None


def _wrong_ids(ids: object, most: int, vocab_size: int) -> str | None:
    """What would do instead of these token ids."""
    if not isinstance(ids, tuple) or not all(_is_whole(token) and 0 <= token < vocab_size for token in ids):
        return f"must be a tuple of token ids, from 0 to below {vocab_size}"
    return f"has {len(ids)} token ids; at most {most}" if len(ids) > most else None


def _wrong_bias(pairs: object, vocab_size: int) -> str | None:
    """What would do instead of these pairs of token and bias."""
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        return "must be a tuple of pairs of a token id and a number"
    if len(pairs) > limits.MAX_BIASES:
        return f"has {len(pairs)} tokens; at most {limits.MAX_BIASES}"
    if not all(_is_whole(token) and 0 <= token < vocab_size for token, _ in pairs):
        return f"token ids must be from 0 to below {vocab_size}"
    if len({token for token, _ in pairs}) < len(pairs):
        return "has a token twice"
    if not all(_is_number(bias) and abs(bias) <= limits.MAX_BIAS for _, bias in pairs):
        return f"biases must be numbers from -{limits.MAX_BIAS:.0f} to {limits.MAX_BIAS:.0f}"
    return None


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number and no infinity; a whole number beyond all floats is none either."""
    return (_is_whole(value) or isinstance(value, float)) and abs(value) <= sys.float_info.max
