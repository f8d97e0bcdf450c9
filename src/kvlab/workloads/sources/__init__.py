"""Where requests come from, by name: one file per source."""

from collections.abc import Iterable
from typing import Protocol

from kvlab.config import WorkloadConfig
from kvlab.core import Request
from kvlab.registry import Registry


class WorkloadSource(Protocol):
    """Makes the requests of a workload, in any order, but a turn behind the one it follows. The same seed gives the
    same requests.

    Raises WorkloadError for what cannot be read. A generator is stopped where the requests so far fill the memory.
    """

    def __call__(self, config: WorkloadConfig, *, vocab_size: int, seed: int) -> Iterable[Request]:
        """The requests of `config`, with token ids below `vocab_size`; or with a `prompt` and no token ids, which
        the model's tokenizer makes of it.
        """


WORKLOAD_SOURCES: Registry[WorkloadSource] = Registry("workload.source", __name__)
