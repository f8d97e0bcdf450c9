"""The tensors behind a pool, apart from the ledger that says who owns them."""

import torch

from kvlab.errors import CapacityError
from kvlab.kernels.cpu.memory import empty
from kvlab.kv.formats import FORMATS, KVFormat
from kvlab.kv.spec import KVSpec, PageLayout


class KVStorage:
    """K and V of every block, `[layers, blocks, kv_heads, block_size, head_dim]` each, reserved at once.

    `layers` are those of a block: all of the model's, or as many as a group of its layers has (`spec.places`).

    They are indexed so in any layout. `layout` is their order in memory: HND is that of the indices, and in NHD
    `keys.transpose(2, 3)` is contiguous.

    K and V each have a format (`kv/formats.py`), in which a head may have another width. In int8 and fp8 each
    token's head has a scale beside it: `key_scales` and `value_scales` `[layers, blocks, kv_heads, block_size]`
    float32, which else are None.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
        layout: PageLayout = PageLayout.HND,
    ) -> None:
        self.spec = spec
        self.places = torch.tensor(spec.places, dtype=torch.int32)  # as `spec.places`, on the host
        self.layout = layout
        self.block_size = block_size
        self.device = torch.device(device)
        self._formats = key_format, value_format = FORMATS[spec.dtypes[0]], FORMATS[spec.dtypes[1]]
        rows = (spec.layers_per_block, num_blocks, spec.num_kv_heads, block_size)
        key_width, value_width = (
            size // kind.dtype.itemsize for size, kind in zip(spec.row_bytes, self._formats, strict=True)
        )
        key_scaled, value_scaled = spec.is_scaled
        try:
            self.keys = self._zeros((*rows, key_width), key_format.dtype)
            self.values = self._zeros((*rows, value_width), value_format.dtype)
            self.key_scales = self._zeros(rows, torch.float32) if key_scaled else None
            self.value_scales = self._zeros(rows, torch.float32) if value_scaled else None
        # torch has no narrower type for "no memory" on a CPU
        except (RuntimeError, OSError, OverflowError) as error:
            raise CapacityError(
                f"KV cache of {num_blocks} blocks of {block_size} tokens "
                f"({num_blocks * block_size * spec.bytes_per_slot} bytes) does not fit on {self.device}: {error}"
            ) from error

        # Buffers of `gather`, sized on first use for the longest sequence so far.
        self._gathered_keys = torch.empty(0, dtype=self.keys.dtype, device=self.device)
        self._gathered_values = torch.empty(0, dtype=self.values.dtype, device=self.device)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """On a CPU in large pages, as blocks are read from all over the pool, and all of it taken now: the first
        sequences are not to wait for memory.
        """
        if self.layout is PageLayout.NHD:
            layers, blocks, kv_heads, block_size, *rest = shape
            shape = (layers, blocks, block_size, kv_heads, *rest)
        on_cpu = self.device.type == "cpu"
        zeros = empty(shape, dtype).zero_() if on_cpu else torch.zeros(shape, dtype=dtype, device=self.device)
        return zeros if self.layout is PageLayout.HND else zeros.transpose(2, 3)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        every = (self.keys, self.values, self.key_scales, self.value_scales)
        return [tensor for tensor in every if tensor is not None]

    @property
    def is_plain(self) -> bool:
        """Whether K and V are stored as the numbers that they are."""
        return all(kind.is_plain for kind in self._formats)

    @property
    def _both(self) -> tuple[tuple[KVFormat, torch.Tensor, torch.Tensor | None], ...]:
        """Format, numbers and scales of K and of V."""
        keys, values = self._formats
        return (keys, self.keys, self.key_scales), (values, self.values, self.value_scales)

    def write(
        self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store `k` and `v` `[T, kv_heads, head_dim]` at `(blocks[t], offsets[t])`."""
        for x, (kind, cache, scales) in zip((k, v), self._both, strict=True):
            stored, factors = kind.pack(x)
            cache[layer][blocks, :, offsets] = stored
            if scales is not None and factors is not None:
                scales[layer][blocks, :, offsets] = factors

    def read(self, layer: int, block: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a block's first tokens, `[kv_heads, tokens, head_dim]`; no copy of a plain format, float32 of
        others.
        """
        at = (layer, block, slice(None), slice(tokens))
        k, v = (
            _unpacked(kind, cache[at], None if scales is None else scales[at]) for kind, cache, scales in self._both
        )
        return k, v

    def gather(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one sequence, `[kv_heads, token slots, head_dim]`: of a plain format in buffers that the next
        call reuses, of others new tensors in float32.

        `rows` `[kv_heads * n]` lists, head by head, `block_id * kv_heads + head` of the sequence's n blocks.
        """
        slots = len(rows) * self.block_size
        if self._gathered_keys.numel() < slots * self.keys.shape[-1]:
            self._gathered_keys = self.keys.new_empty(2 * slots * self.keys.shape[-1])
            self._gathered_values = self.values.new_empty(2 * slots * self.values.shape[-1])
        buffers = self._gathered_keys, self._gathered_values
        k, v = (
            _unpacked(
                kind,
                self._gather(cache[layer], rows, buffer[: slots * cache.shape[-1]]),
                None if scales is None else self._gather(scales[layer].unsqueeze(-1), rows).squeeze(-1),
            )
            for (kind, cache, scales), buffer in zip(self._both, buffers, strict=True)
        )
        return k, v

    def _gather(self, cache: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`rows` of a layer's `cache` `[blocks, kv_heads, block_size, size]`: `[kv_heads, token slots, size]`."""
        kv_heads, size = self.spec.num_kv_heads, cache.shape[-1]
        hnd = self.layout is PageLayout.HND
        row = self.block_size * size
        if not hnd:  # a block's heads lie together: one row for all of them
            rows, row = rows[: len(rows) // kv_heads] // kv_heads, kv_heads * row
        table = (cache if hnd else cache.transpose(1, 2)).view(-1, row)
        gathered = torch.index_select(table, 0, rows, out=None if out is None else out.view(-1, row))
        return gathered.view(kv_heads, -1, size) if hnd else gathered.view(-1, kv_heads, size).transpose(0, 1)

    def block_bytes(self) -> list[torch.Tensor]:
        """The bytes of each tensor in place, `[layers, blocks, bytes]` uint8, in their order in memory."""
        in_memory = [t if self.layout is PageLayout.HND else t.transpose(2, 3) for t in self._tensors]
        return [tensor.flatten(2).view(torch.uint8) for tensor in in_memory]

    def copy_blocks(self, source: list[int], target: list[int]) -> None:
        """Copy whole blocks on every layer."""
        for tensor in self._tensors:
            tensor[:, target] = tensor[:, source]


def _unpacked(kind: KVFormat, stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return stored if kind.is_plain else kind.unpack(stored, scales)
