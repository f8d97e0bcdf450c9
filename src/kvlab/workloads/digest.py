"""A fingerprint of a workload: equal for runs that served the same requests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvlab.core import Request


def workload_digest(requests: Sequence[Request]) -> str:
    """16 hexadecimal digits over every request's arrival, prompt, output length, samples, priority, deadline and
    what it follows.
    """
    digest = hashlib.sha256()
    for request in requests:
        sampling = request.sampling
        head: tuple[object, ...] = (
            request.arrival_s,
            sampling.max_tokens,
            sampling.n,
            request.salt,
            request.follows,
        )
        if request.priority:  # so that workloads without keep their digests
            head += (request.priority,)
        if request.deadline_s is not None:
            head += ("deadline", request.deadline_s)
        digest.update(repr(head).encode())
        digest.update(np.array(request.prompt_token_ids, dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]
