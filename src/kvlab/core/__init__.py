"""The nouns that every layer shares: requests, sequences, and what happens to them in one step."""

from kvlab.core.limits import MAX_SAMPLES, MAX_TEMPERATURE, MAX_WHOLE
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
from kvlab.core.request import Grammar, GrammarState, Message, Request, SamplingParams
from kvlab.core.sequence import Sequence, SequenceSpec, SequenceStatus

__all__ = [
    "MAX_SAMPLES", "MAX_TEMPERATURE", "MAX_WHOLE", "TIER_COUNTERS", "UNKNOWN_TOKEN", "FinishReason", "Grammar",
    "GrammarState", "Message", "PoolCounters", "PoolStats", "Request", "RequestRecord", "Salt",
    "SamplingParams", "Sequence", "SequenceSpec", "SequenceStatus", "StepOutput", "StepRecord",
    "TokenLogprobs", "attended_pairs",
]  # fmt: skip
