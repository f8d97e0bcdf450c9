"""A fingerprint of a workload: equal for runs that served the same requests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvlab.core import Request


def workload_digest(requests: Sequence[Request]) -> str:
    """16 hexadecimal digits over every request's arrival, prompt and output length."""
    digest = hashlib.sha256()
    for request in requests:
        digest.update(np.array([request.arrival_s, request.sampling.max_tokens], dtype=np.float64).tobytes())
        digest.update(np.array(request.prompt_token_ids, dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]
