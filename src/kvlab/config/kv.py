"""The KV cache: its layout and its size."""

from collections.abc import Collection
from dataclasses import dataclass

from kvlab.config.values import MOST_SECONDS, at_least, one_of, parse_bytes
from kvlab.errors import ConfigError
from kvlab.registry import registry

KV_DTYPES = ("auto", "int8", "fp8_e4m3", "fp8_e5m2", "int4")


@dataclass
class KVConfig:
    """The KV cache: how it is laid out and how large it is.

    Size is `num_blocks` or `memory`; with neither, the bytes of `scheduler.max_batch_size` contiguous slots
    of `model.max_seq_len` tokens. The same setting gives either backend the same bytes.
    """

    backend: str = "paged"  # paged: blocks of block_size tokens; contiguous: a slot of max_seq_len tokens each
    dtype: str = "auto"  # auto: executor.dtype; int8, fp8_e4m3, fp8_e5m2: a scale per token and head; int4: per 32
    key_dtype: str | None = None  # of K alone; null: kv.dtype
    value_dtype: str | None = None  # of V alone; null: kv.dtype
    block_size: int = 16  # token slots of a block; for contiguous only the unit of num_blocks
    num_blocks: int | None = None  # blocks of all layers; null: by memory, or by scheduler.max_batch_size
    memory: str | None = None  # bytes of K and V, as 512MiB or 4GiB, instead of num_blocks
    windows: bool = True  # paged: layers with a sliding window give back what left it; false: keep all
    prefix_sharing: bool = True  # paged: store equal prefixes once, and keep them cached after their sequences
    partial_reuse: bool = False  # paged, all layers alike: find parts of blocks too, as TensorRT-LLM, and copy them
    merge_equal: bool = True  # paged: of two blocks of equal content one goes; false: both stay, as in vLLM
    eviction: str = "lru"  # which cached block is evicted first
    offload: str | None = None  # host memory for blocks that the pool evicts, as 4GiB; null: none
    offload_eviction: str = "lru"  # which block leaves host memory first, and which the disk
    offload_disk: str | None = None  # room on a disk for blocks that leave host memory, as 64GiB; null: none
    offload_dir: str | None = None  # the directory for them, which outlives the engine: of one at a time, one model
    pinned_share: float = 0.0  # most of the pool that prefixes which requests pin may take; 0: none is pinned
    pin_ttl_s: float | None = None  # a pin ends that no request has used for so long; null: it stays
    ttl_s: float | None = None  # cached blocks that no request has used for so long are given up; null: never
    quota: float | None = None  # share of the pool; of a salt that has more, cached blocks are evicted first

    def __post_init__(self) -> None:
        registry("kv.backend").check(self.backend)
        for key, value in (("dtype", self.dtype), ("key_dtype", self.key_dtype), ("value_dtype", self.value_dtype)):
            if value is not None:
                if value == "fp8":
                    text = "which one? fp8_e4m3 (4 bits of exponent, 3 of mantissa) or fp8_e5m2 (5 and 2)"
                    raise ConfigError(f"kv.{key}", value, text)
                one_of(f"kv.{key}", value, KV_DTYPES)
        registry("kv.eviction").check(self.eviction)
        at_least("kv.block_size", self.block_size, 1)
        at_least("kv.num_blocks", self.num_blocks, 1)
        if self.memory is not None and self.num_blocks is not None:
            text = f"kv.num_blocks={self.num_blocks} is given too; give one of them"
            raise ConfigError("kv.memory", self.memory, text)
        if self.memory is not None and parse_bytes(self.memory, key="kv.memory") == 0:
            raise ConfigError("kv.memory", self.memory, "must be more than 0 bytes")
        if not self.merge_equal and not self.may_keep_equal(self.eviction, self.retention):
            other = ", ".join([*self.retention] if self.eviction == "lru" else [f"kv.eviction={self.eviction}"])
            text = f"is for kv.eviction=lru without pins, times to live and quotas; here is {other}; leave it true"
            raise ConfigError("kv.merge_equal", False, text)
        self._check_offload()
        self._check_retention()

    @staticmethod
    def may_keep_equal(eviction: str, retention: Collection[str]) -> bool:
        """Whether equal blocks may both stay: where each goes in its turn."""
        return eviction == "lru" and not retention

    @property
    def retention(self) -> dict[str, float]:
        """The settings of how long cached blocks are kept that are given, by their keys; usually none."""
        given = {"pinned_share": self.pinned_share or None, "pin_ttl_s": self.pin_ttl_s, "ttl_s": self.ttl_s}
        values = {f"kv.{name}": value for name, value in (given | {"quota": self.quota}).items()}
        return {key: value for key, value in values.items() if value is not None}

    def _check_retention(self) -> None:
        at_least("kv.pinned_share", self.pinned_share, 0, 1)
        for name, value, most in (
            ("pin_ttl_s", self.pin_ttl_s, MOST_SECONDS),
            ("ttl_s", self.ttl_s, MOST_SECONDS),
            ("quota", self.quota, 1),
        ):
            if value is not None and not 0 < value <= most:
                raise ConfigError(f"kv.{name}", value, f"must be a number, more than 0 and at most {most}, or null")
        for key, value in self.retention.items():
            self._check_keeps_blocks(key, value)

    def _check_offload(self) -> None:
        registry("kv.eviction").check(self.offload_eviction, key="kv.offload_eviction")
        for key, value in (("kv.offload", self.offload), ("kv.offload_disk", self.offload_disk)):
            if value is None:
                continue
            if parse_bytes(value, key=key) == 0:
                raise ConfigError(key, value, "must be more than 0 bytes, or null")
            self._check_keeps_blocks(key, value)
            if self.ttl_s is not None:
                text = f"keeps what the pool evicts, whatever kv.ttl_s={self.ttl_s} says; leave one of them null"
                raise ConfigError(key, value, text)
        if self.offload_dir is not None and self.offload_disk is None:
            text = "is for the blocks of kv.offload_disk, which is null; set how much room they have, as 64GiB"
            raise ConfigError("kv.offload_dir", self.offload_dir, text)

    def _check_keeps_blocks(self, key: str, value: object) -> None:
        """Raise ConfigError for a setting of cached blocks where there are none."""
        if not registry("kv.backend").get(self.backend).is_paged():
            text = f"is for cached blocks, and kv.backend={self.backend} keeps none; use kv=paged"
            raise ConfigError(key, value, text)
        if not self.prefix_sharing:
            text = "is for cached blocks, and kv.prefix_sharing=false keeps none; set it to true"
            raise ConfigError(key, value, text)
