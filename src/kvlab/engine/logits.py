"""What sampling parameters do to logits: each function changes `scores` `[rows, vocab]`, float32, in place.

A row whose parameter asks for nothing is left alone and costs nothing. Tokens that are as likely as the last one
kept are kept too, so that no result depends on the order of equal logits.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch

from kvlab.models.ops.base import LogitsOps

_MASKED = float("-inf")
_NUCLEI = (256, 4096, 2**31)  # how many of the most likely tokens to search for the nucleus: first few, then all
_MAX_CANDIDATES = 1024  # the largest top_k of a row for which candidates are listed


def penalize_repetition(
    scores: torch.Tensor, penalties: Sequence[float], token_ids: Sequence[Sequence[int]]
) -> None:
    """Divide the positive scores of a row's `token_ids` by its penalty, multiply the negative ones (CTRL, Keskar
    et al., 2019; with prompt and output as token ids, as in transformers).
    """
    rows = [row for row, penalty in enumerate(penalties) if penalty != 1]
    if not rows:
        return
    where = _tensor([row for row in rows for _ in token_ids[row]], torch.long, scores)
    which = _tensor([token for row in rows for token in token_ids[row]], torch.long, scores)
    penalty = _tensor(penalties, torch.float32, scores)[where]
    seen = scores[where, which]  # a token that occurs twice is read twice before it is written
    scores[where, which] = torch.where(seen > 0, seen / penalty, seen * penalty)


def penalize_output(
    scores: torch.Tensor, presence: Sequence[float], frequency: Sequence[float], token_ids: Sequence[Sequence[int]]
) -> None:
    """Take from the scores of a row's output `token_ids` its `presence` once, and its `frequency` as often as the
    token occurs (as OpenAI's API defines both).
    """
    taken = {
        (row, token): presence[row] + frequency[row] * count
        for row, tokens in enumerate(token_ids)
        if presence[row] or frequency[row]
        for token, count in Counter(tokens).items()
    }
    _add(scores, {place: -value for place, value in taken.items()})


def add_bias(scores: torch.Tensor, biases: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Add to the scores of a row's tokens what its pairs of token and bias say; no token is there twice."""
    _add(scores, {(row, token): value for row, pairs in enumerate(biases) for token, value in pairs})


def mask_tokens(scores: torch.Tensor, token_ids: Sequence[Collection[int]]) -> None:
    """Make a row's `token_ids` impossible; ids beyond the vocabulary are so already."""
    pairs = [(row, token) for row, ids in enumerate(token_ids) for token in ids if token < scores.shape[1]]
    if pairs:
        rows, tokens = zip(*pairs, strict=True)
        scores[_tensor(rows, torch.long, scores), _tensor(tokens, torch.long, scores)] = _MASKED


def keep_tokens(scores: torch.Tensor, token_ids: Sequence[Collection[int]]) -> None:
    """Make all but a row's `token_ids` impossible; none of them keeps all."""
    for row, ids in enumerate(token_ids):
        if ids:
            which = _tensor([token for token in ids if token < scores.shape[1]], torch.long, scores)
            kept = scores[row, which]
            scores[row] = _MASKED
            scores[row, which] = kept


def apply_temperature(scores: torch.Tensor, temperatures: Sequence[float]) -> None:
    """Divide each row by its temperature, more than 0. A row's maximum becomes 0, so that nothing overflows."""
    scores -= scores.amax(dim=-1, keepdim=True)
    scores /= _tensor(temperatures, torch.float32, scores).clamp(min=torch.finfo(torch.float32).tiny)[:, None]


def top_k_candidates(scores: torch.Tensor, counts: Sequence[int], ops: LogitsOps) -> tuple[list[int], torch.Tensor]:
    """The rows of which top-k leaves few tokens, and token ids that hold all of these `[rows found, tokens]`, in
    the order of the vocabulary. What follows costs next to nothing on the scores of these tokens alone, and gives
    the same. A row with very many that are equal to the last kept is not found.
    """
    short = [row for row, count in enumerate(counts) if 0 < count < min(_MAX_CANDIDATES, scores.shape[1])]
    if not short:
        return [], torch.empty(0, 0, dtype=torch.long, device=scores.device)
    wanted = _tensor([counts[row] for row in short], torch.long, scores)[:, None]
    width = min(2 * max(counts[row] for row in short), scores.shape[1])  # some room for equals
    some = scores if len(short) == len(scores) else scores[short]
    values, indices = ops.topk(some, width)
    whole = (values.gather(1, wanted - 1) > values[:, -1:]).flatten() | (width == scores.shape[1])
    whole_rows = [row for row, is_whole in zip(short, whole.tolist(), strict=True) if is_whole]
    return whole_rows, indices[whole].sort(dim=-1).values


def keep_top_k(scores: torch.Tensor, counts: Sequence[int], ops: LogitsOps) -> None:
    """Mask all but the row's `count` largest scores; 0 keeps all."""
    rows = [row for row, count in enumerate(counts) if 0 < count < scores.shape[1]]
    if not rows:
        return
    some = scores[rows]
    largest = ops.topk(some, max(counts[row] for row in rows)).values
    last = largest.gather(1, _tensor([counts[row] - 1 for row in rows], torch.long, scores)[:, None])
    scores[rows] = some.masked_fill(some < last, _MASKED)


def keep_top_p(scores: torch.Tensor, masses: Sequence[float], ops: LogitsOps) -> None:
    """Mask all but the nucleus: the fewest most likely tokens that together have at least the probability `mass`
    (Holtzman et al., 2020); 1 keeps all.
    """
    rows = [row for row, mass in enumerate(masses) if mass < 1]
    if not rows:
        return
    some = scores[rows]
    weights = _weights(some)
    wanted = _tensor([masses[row] for row in rows], torch.float64, scores)[:, None]
    wanted = wanted * weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    last, left = torch.empty_like(wanted, dtype=torch.float32), torch.arange(len(rows), device=scores.device)
    for width in _NUCLEI:
        likely = ops.topk(weights[left], min(width, scores.shape[1])).values
        together = likely.cumsum(dim=-1, dtype=torch.float64)
        count = ((together - likely) < wanted[left]).sum(dim=-1, keepdim=True)
        last[left] = likely.gather(1, count - 1)
        left = left[(together[:, -1:] < wanted[left]).flatten()]
        if not len(left):
            break
    scores[rows] = some.masked_fill_(weights < last, _MASKED)


def keep_min_p(scores: torch.Tensor, shares: Sequence[float]) -> None:
    """Mask tokens less likely than `share` times the most likely one (Nguyen et al., 2024); 0 keeps all.

    Ratios of probabilities are differences of scores, so what other filters kept makes no difference.
    """
    if any(shares):
        least = scores.amax(dim=-1) + _tensor(shares, torch.float32, scores).log()
        scores.masked_fill_(scores < least[:, None], _MASKED)


def sample(scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One token of each row, `[rows]`, from softmax(scores): the first at which the cumulated probability exceeds
    the row's uniform number, `[rows]` float64. Each row has a finite maximum.
    """
    cumulated = _weights(scores).cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(cumulated, uniforms[:, None] * cumulated[:, -1:], right=True).flatten()


def _weights(scores: torch.Tensor) -> torch.Tensor:
    """What the probabilities are proportional to. Not divided by their sum: it would differ in its last digit
    between all tokens and candidates.
    """
    return (scores - scores.amax(dim=-1, keepdim=True)).exp_()


def _add(scores: torch.Tensor, values: Mapping[tuple[int, int], float]) -> None:
    if values:
        rows, tokens = zip(*values, strict=True)
        where = _tensor(rows, torch.long, scores), _tensor(tokens, torch.long, scores)
        scores[where] += _tensor(list(values.values()), torch.float32, scores)


def _tensor(values: Sequence[float], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)
