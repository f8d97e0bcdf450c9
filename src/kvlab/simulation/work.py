"""What a step consists of, in terms that its time is made of: a row of numbers for each step.

A fit gives each term its seconds; the same rows are built from the records of real steps and from simulated ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlab.core import StepRecord
from kvlab.models.config import DecoderConfig

TILE = 16  # rows that a matrix unit multiplies at once: AMX on a CPU, half a tile of a tensor core's instructions
KNOTS = (64, 256)  # rows from which on each may cost more: where arithmetic hides behind memory no longer

Rows = NDArray[np.float64]
Count = TypeVar("Count", float, Rows)


class Term(NamedTuple):
    """A part of a step's time. Its coefficient is in seconds for one."""

    name: str
    what: str
    per: int = 1  # how many of them to show the time of


TERMS = (
    Term("weights", "step: weights streamed, and what does not grow"),
    Term("sequences", "sequence"),
    Term("rows", "row of matrix products"),
    Term("tiles", f"tile of {TILE} rows"),
    *(Term(f"rows_{knot}", f"row beyond {knot}") for knot in KNOTS),
    Term("read", "context tokens read", 1000),
    Term("repeated", "context tokens read again, for another sequence", 1000),
    Term("pairs", "pairs of prompt token and token it attends to", 1000),
)
NAMES = [term.name for term in TERMS]


@dataclass(frozen=True, slots=True)
class Work:
    """What steps have to do; each a whole number of one step."""

    sequences: int
    tokens: int  # computed in the step
    sampled: int  # rows of logits
    context: int  # tokens whose K and V are read, of all sequences, the step's own included
    repeated: int  # of those, in blocks that another sequence of the step reads too
    attended: int  # pairs of a token of the step and one it attends to

    @classmethod
    def of(cls, step: StepRecord) -> Work:
        """The work of a recorded step. Blocks are in use once, however many sequences read them."""
        distinct = step.pool.tokens_stored if step.pool is not None else step.context_tokens
        return cls(
            sequences=step.batch_seqs,
            tokens=step.prefill_tokens + step.decode_tokens,
            sampled=step.sampled_tokens,
            context=step.context_tokens,
            repeated=max(0, step.context_tokens - distinct),
            attended=step.attended_tokens,
        )


WORK = [field.name for field in fields(Work)]


def rows(model: DecoderConfig, works: Sequence[Work]) -> Rows:
    """`[N, len(TERMS)]`: how often each of N steps has each term.

    Rows and tiles count as means over the weights: the output layer has those that are sampled, all other matrices
    every token. Layers with a sliding window count as in `within_windows`.
    """
    table = np.array([[getattr(work, name) for name in WORK] for work in works], dtype=np.float64)
    sequences, tokens, sampled, context, repeated, attended = table.reshape(-1, len(WORK)).T
    head = model.vocab_size * model.hidden_size
    head_share = head / (head + model.body_parameters)

    def over_weights(body: Rows, output: Rows) -> Rows:
        return (1 - head_share) * body + head_share * output

    read, pairs = np.zeros_like(context), np.zeros_like(context)
    for share, seen, met in within_windows(model, sequences, tokens, context, attended):
        read += share * seen
        pairs += share * np.maximum(0, met - seen)
    repeated = repeated * read / np.maximum(context, 1)
    columns = [
        over_weights(np.ones_like(tokens), np.minimum(sampled, 1)),
        sequences,
        over_weights(tokens, sampled),
        over_weights(np.ceil(tokens / TILE), np.ceil(sampled / TILE)),
        *(over_weights(np.maximum(tokens - knot, 0), np.maximum(sampled - knot, 0)) for knot in KNOTS),
        read - repeated,
        repeated,
        pairs,
    ]
    return np.stack(columns, axis=1)


def within_windows(
    model: DecoderConfig, sequences: Count, tokens: Count, context: Count, attended: Count
) -> Iterator[tuple[float, Count, Count]]:
    """For each width of window: the share of the layers with K and V that have it; of steps with these sums over
    sequences the tokens whose K and V such a layer reads, and the pairs of a token and one it attends to.

    The sums are cut off at the window, which is exact where all sequences are shorter than it, or all longer.
    """
    windows = model.windows
    for window, layers in windows.items():
        most = np.inf if window is None else window
        read = np.minimum(context, sequences * most + tokens)
        yield layers / windows.total(), read, np.minimum(attended, tokens * most)


def most(works: Iterable[Work]) -> dict[str, int]:
    """The largest of each of the steps' figures."""
    steps = list(works)
    return {name: max(getattr(work, name) for work in steps) for name in WORK}
