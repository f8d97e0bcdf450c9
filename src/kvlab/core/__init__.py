"""The nouns that every layer shares: requests, sequences, and what happens to them in one step."""

from kvlab.core.pool import TIER_COUNTERS, PoolCounters, PoolStats, Salt
from kvlab.core.records import (
    UNKNOWN_TOKEN,
    FinishReason,
    RequestRecord,
    StepOutput,
    StepRecord,
    TokenLogprobs,
    attended_pairs,
)
from kvlab.core.request import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_SAMPLES,
    MAX_STOP_CHARS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MAX_WHOLE,
    Message,
    Request,
    SamplingParams,
)
from kvlab.core.sequence import Sequence, SequenceSpec, SequenceStatus

__all__ = [
    "MAX_BIAS",
    "MAX_BIASES",
    "MAX_LOGPROBS",
    "MAX_PENALTY",
    "MAX_SAMPLES",
    "MAX_STOPS",
    "MAX_STOP_CHARS",
    "MAX_STOP_TOKENS",
    "MAX_TEMPERATURE",
    "MAX_WHOLE",
    "TIER_COUNTERS",
    "UNKNOWN_TOKEN",
    "FinishReason",
    "Message",
    "PoolCounters",
    "PoolStats",
    "Request",
    "RequestRecord",
    "Salt",
    "SamplingParams",
    "Sequence",
    "SequenceSpec",
    "SequenceStatus",
    "StepOutput",
    "StepRecord",
    "TokenLogprobs",
    "attended_pairs",
]
