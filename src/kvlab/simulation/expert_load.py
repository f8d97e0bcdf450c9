"""How many experts of a layer the tokens of a step meet: as measurements deal them, and as tokens draw them.

The tables' collector (ai-dynamo/aiconfigurator, collector/helper.py) deals choices to experts by a power law whose
most popular expert is chosen 0.8 times as often as there are tokens, the least popular once. No more choices than
there are experts it deals by a law of their own, most of them to an expert that has no other. In a server an expert
is as popular with few tokens as with many, and each token draws its own: fewer experts are met, and read.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

POWER = 1.2  # of the law, where no bias corrects the router
#: How many times as often the most popular expert is chosen as the least: as the law has them for 128 tokens. Of
#: 32, 64, 128 and 256 the one nearest to deployments for fitting (experiments/simulated_vs_silicon).
SPREAD = 0.8 * 128
FEWEST = 128  # experts of the mixtures that this was seen on: of fewer no deployment was measured
#: Numbers of tokens that experts were measured with: between them the tables interpolate.
_MEASURED = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
_MOST_DEALT = 2.0  # times the mean, of no more choices than experts,
_LEAST_DEALT = 0.01  # and the least


def dealt(tokens: int, experts: int, active: int) -> float:
    """Experts that a measurement of so many tokens met, `active` for each token."""
    if tokens > _MEASURED[-1]:
        return _dealt(tokens, experts, active)
    return float(np.interp(tokens, _MEASURED, [_dealt(count, experts, active) for count in _MEASURED]))


def drawn(tokens: int, experts: int, active: int) -> float:
    """Experts that so many tokens of a server meet, expected."""
    chances = np.minimum(active * _shares(experts, 1.0, SPREAD), 1.0)
    return float((1 - (1 - chances) ** tokens).sum())


@cache
def _dealt(tokens: int, experts: int, active: int) -> float:
    choices = tokens * active
    ends = (1.0, 0.8 * tokens) if choices > experts else (_LEAST_DEALT, _MOST_DEALT)
    counts = np.minimum(np.rint(choices * _shares(experts, *ends)), tokens)
    left = max(0.0, choices - counts.sum())  # what rounding leaves goes to experts that have least
    return float(min(experts, np.count_nonzero(counts) + left))


def _shares(experts: int, least: float, most: float) -> NDArray[np.float64]:
    """Of all choices, those of each expert: quantiles of the law, the least popular first."""
    places = (np.arange(experts) + 0.5) / experts
    first, last = least ** (1 - POWER), most ** (1 - POWER)
    law = (first + (last - first) * places) ** (1 / (1 - POWER))
    shares: NDArray[np.float64] = law / law.sum()
    return shares
