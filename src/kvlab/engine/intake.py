"""Requests that the engine does not take: what is wrong with them, and what would do."""

from __future__ import annotations

from kvlab.core import Request
from kvlab.engine.scheduler.line import WaitingLine
from kvlab.errors import RequestRefusedError


def check_prompt(request: Request, vocab_size: int | None) -> None:
    """Raise RequestRefusedError for a prompt that is empty, or no tokens of this vocabulary (None: any)."""
    prompt, name = request.prompt_token_ids, f"request {request.request_id!r}"
    if not prompt:
        raise RequestRefusedError(f"{name}: an empty prompt")
    if not {int}.issuperset(map(type, prompt)):
        wrong = next(token for token in prompt if type(token) is not int)
        raise RequestRefusedError(f"{name}: token id {wrong!r} is no whole number")
    low, high = min(prompt), max(prompt)
    if vocab_size is not None and (low < 0 or high >= vocab_size):
        wrong = low if low < 0 else high
        raise RequestRefusedError(f"{name}: token id {wrong} is outside the vocabulary of {vocab_size}")


def check_fits(request: Request, most: int) -> None:
    """Raise RequestRefusedError for a request that can grow to more than `most` tokens, those of the largest
    sequence that fits.
    """
    prompt, output = len(request.prompt_token_ids), request.sampling.max_tokens
    if prompt + output > most:
        would = f"max_tokens={most - prompt}" if prompt < most else f"a prompt of up to {most - 1} tokens"
        raise RequestRefusedError(
            f"request {request.request_id!r}: {prompt} prompt tokens + {output} output tokens can never fit; the "
            f"pool takes sequences of up to {most} tokens; {would} would fit"
        )


def check_line(request: Request, line: WaitingLine, most: int | None) -> None:
    """Raise RequestRefusedError where as many requests wait as may; samples of one request count once."""
    if most is None or len(line) < most:
        return
    waiting = len({sequence.request.request_id for sequence in line})
    if waiting >= most:
        raise RequestRefusedError(
            f"request {request.request_id!r}: {waiting} requests are waiting, and "
            f"scheduler.max_waiting_requests={most} allows no more"
        )
