"""Sampling by the book, one row and one token at a time, in Python's own numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cache

import torch

from kvlab.core import Request, SamplingParams
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.storage import KVStorage
from tests.support.model import tiny_config, tiny_decoder

WORD = 2**64 - 1


def mix(word: int) -> int:
    """The finaliser of SplitMix64, as its authors print it."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
    return word ^ (word >> 31)


def uniform(seed: int, sample: int, position: int) -> float:
    state = 0
    for word in (seed, sample, position):
        state = mix(((state ^ (word & WORD)) + 0x9E3779B97F4A7C15) & WORD)
    return (state >> 12) / 2**52


def adjusted(
    logits: Sequence[float],
    sampling: SamplingParams,
    token_ids: Sequence[int],
    barred: Collection[int],
    outputs: int = 0,
) -> list[float]:
    """Logits with biases and penalties applied and barred tokens made impossible; the last `outputs` tokens are
    those of the output.
    """
    scores = list(logits)
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in set(token_ids):
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    output = list(token_ids)[len(token_ids) - outputs :]
    for token in set(output):
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    ends = [word[-1] for word in sampling.bad_words if output[len(output) - len(word) + 1 :] == list(word[:-1])]
    others = set(range(len(scores))) - set(sampling.allowed_token_ids) if sampling.allowed_token_ids else set()
    for token in {*barred, *ends, *others}:
        if token < len(scores):
            scores[token] = -math.inf
    return scores


def softmax(scores: Sequence[float]) -> list[float]:
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / sum(weights) for weight in weights]


def distribution(scores: Sequence[float], sampling: SamplingParams) -> list[float]:
    """The probability of each token, for a temperature above 0. Ties with the last token kept are kept."""
    scores = [score / sampling.temperature for score in scores]
    if sampling.top_k:
        last = sorted(scores, reverse=True)[: sampling.top_k][-1]
        scores = [score if score >= last else -math.inf for score in scores]
    shares = softmax(scores)
    if sampling.top_p < 1:
        together, last = 0.0, 0.0
        for last in sorted(shares, reverse=True):
            together += last
            if together >= sampling.top_p:
                break
        scores = [score if share >= last else -math.inf for score, share in zip(scores, shares, strict=True)]
        shares = softmax(scores)
    least = sampling.min_p * max(shares)
    return softmax([score if share >= least else -math.inf for score, share in zip(scores, shares, strict=True)])


def pick(
    logits: Sequence[float],
    sampling: SamplingParams,
    *,
    token_ids: Sequence[int] = (),
    barred: Collection[int] = (),
    index: int = 0,
    position: int = 0,
) -> int:
    """The token of one row."""
    scores = adjusted(logits, sampling, token_ids, barred, position if token_ids else 0)
    if sampling.temperature == 0:
        return scores.index(max(scores))
    number, together = uniform(sampling.seed or 0, index, position), 0.0
    shares = distribution(scores, sampling)
    for token, share in enumerate(shares):
        together += share
        if together > number:
            return token
    return max(token for token, share in enumerate(shares) if share)


def reference_tokens(asked: Request, index: int = 0, eos: Collection[int] = ()) -> list[int]:
    """What one sample of a request should get: for each token the whole sequence through the model again."""
    sampling = asked.sampling
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
    ids = list(asked.prompt_token_ids)
    for position in range(sampling.max_tokens):
        barred = stops if position < sampling.min_tokens else ()
        logits = _logits(tuple(ids))
        ids.append(pick(logits, sampling, token_ids=ids, barred=barred, index=index, position=position))
        if ids[-1] in stops:
            break
    return ids[len(asked.prompt_token_ids) :]


@cache
def _logits(ids: tuple[int, ...]) -> list[float]:
    pool = ContiguousKVCachePool(1, len(ids), KVStorage(tiny_config().kv_spec("float32"), 1, len(ids)))
    view = pool.view([pool.allocate_slot(len(ids))], [len(ids)])
    logits: list[float] = tiny_decoder().forward(torch.tensor(ids), view, torch.tensor([len(ids) - 1]))[0].tolist()
    return logits
