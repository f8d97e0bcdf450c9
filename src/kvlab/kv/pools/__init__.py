"""KV backends by name: one file per kind of pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvlab.registry import Registry

if TYPE_CHECKING:
    from kvlab.config import KVConfig
    from kvlab.kv.journal import BlockJournal
    from kvlab.kv.protocol import KVCachePool
    from kvlab.kv.storage import KVStorage
    from kvlab.kv.tiers.offload import Offload


class KVBackend(Protocol):
    """What a pool's class says of its pools before there is one: what their blocks are, and how to build one."""

    unit: str  # what people call a block, in the singular
    #: Whether layers with a sliding window give back what has left it, so that `from_config` takes `groups` of
    #: layers, `step_tokens`, the most of a sequence in a step, and `ahead`: a step is reserved while another runs.
    frees_windows: bool

    def is_paged(self) -> bool:
        """Whether a sequence may span several blocks, so that `kv.block_size` is the size of a block."""

    def block_size_for(self, config: KVConfig, max_seq_len: int) -> int:
        """Token slots of a block; sequences have up to `max_seq_len` tokens."""

    def from_config(
        self,
        config: KVConfig,
        num_blocks: int,
        max_seq_len: int,
        storage: KVStorage | None = None,
        *,
        journal: BlockJournal | None = None,
        offload: Offload | None = None,
    ) -> KVCachePool:
        """A pool of `num_blocks` blocks over `storage`; None: without tensors. Its events go to the `journal`,
        what it evicts to `offload`.
        """


POOLS: Registry[KVBackend] = Registry("kv.backend", __name__)


def unit_of(backend: str | None) -> str:
    """What a block of this backend is called; `block` for a backend that is not known here, as in an older run."""
    return POOLS.get(backend).unit if backend in POOLS.names() else "block"
