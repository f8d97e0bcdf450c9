"""The tensors behind a pool, apart from the ledger that says who owns them."""

from __future__ import annotations

from enum import StrEnum

import torch

from kvlab.errors import CapacityError
from kvlab.kernels.cpu.memory import empty
from kvlab.kv.spec import KVSpec

_SMALLEST = 1e-30  # a largest magnitude below this counts as 0 in int8


class PageLayout(StrEnum):
    """The order of a block's axes in memory: N tokens, H heads, D numbers of a head (the names of FlashInfer and
    vLLM).
    """

    HND = "HND"
    NHD = "NHD"


class KVStorage:
    """K and V of every block, `[layers, blocks, kv_heads, block_size, head_dim]` each, reserved at once.

    They are indexed so in any layout. `layout` is their order in memory: HND is that of the indices, and in NHD
    `keys.transpose(2, 3)` is contiguous.

    In int8 each token's head has a scale beside it: `key_scales` and `value_scales` `[layers, blocks, kv_heads,
    block_size]` float32, which else are None. A number is what is stored times its scale.
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
        self.layout = layout
        self.block_size = block_size
        self.device = torch.device(device)
        shape = (spec.num_layers, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        try:
            self.keys = self._zeros(shape, getattr(torch, spec.dtype))
            self.values = self._zeros(shape, self.keys.dtype)
            self.key_scales = self.value_scales = None
            if spec.is_scaled:
                self.key_scales = self._zeros(shape[:-1], torch.float32)
                self.value_scales = self._zeros(shape[:-1], torch.float32)
        # torch has no narrower type for "no memory" on a CPU
        except (RuntimeError, OSError, OverflowError) as error:
            raise CapacityError(
                f"KV cache of {num_blocks} blocks of {block_size} tokens "
                f"({num_blocks * block_size * spec.bytes_per_token} bytes) does not fit on {self.device}: {error}"
            ) from error

        # Buffers of `gather`, sized on first use for the longest sequence so far.
        self._gathered_keys = torch.empty(0, dtype=self.keys.dtype, device=self.device)
        self._gathered_values = torch.empty_like(self._gathered_keys)

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

    def write(
        self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store `k` and `v` `[T, kv_heads, head_dim]` at `(blocks[t], offsets[t])`."""
        if self.key_scales is not None and self.value_scales is not None:
            k, self.key_scales[layer][blocks, :, offsets] = quantize(k)
            v, self.value_scales[layer][blocks, :, offsets] = quantize(v)
        self.keys[layer][blocks, :, offsets] = k
        self.values[layer][blocks, :, offsets] = v

    def read(self, layer: int, block: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a block's first tokens, `[kv_heads, tokens, head_dim]`; no copy, except of int8 as float32."""
        k, v = self.keys[layer, block, :, :tokens], self.values[layer, block, :, :tokens]
        if self.key_scales is None or self.value_scales is None:
            return k, v
        return (
            k * self.key_scales[layer, block, :, :tokens, None],
            v * self.value_scales[layer, block, :, :tokens, None],
        )

    def gather(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one sequence, `[kv_heads, token slots, head_dim]`, in buffers that the next call reuses; of
        int8, new tensors in float32.

        `rows` `[kv_heads * n]` lists, head by head, `block_id * kv_heads + head` of the sequence's n blocks.
        """
        kv_heads, head_dim = self.spec.num_kv_heads, self.spec.head_dim
        row = self.block_size * head_dim
        size = len(rows) * row
        if self._gathered_keys.numel() < size:
            self._gathered_keys = self.keys.new_empty(2 * size)
            self._gathered_values = torch.empty_like(self._gathered_keys)
        if self.layout is PageLayout.NHD:  # a block's heads lie together: one row for all of them
            rows, row = rows[: len(rows) // kv_heads] // kv_heads, kv_heads * row
        k, v = (
            self._gather(cache[layer], rows, row, buffer[:size])
            for cache, buffer in ((self.keys, self._gathered_keys), (self.values, self._gathered_values))
        )
        if self.key_scales is None or self.value_scales is None:
            return k, v
        key_scales, value_scales = self.key_scales[layer].unsqueeze(-1), self.value_scales[layer].unsqueeze(-1)
        row //= head_dim
        return k * self._gather(key_scales, rows, row), v * self._gather(value_scales, rows, row)

    def _gather(
        self, cache: torch.Tensor, rows: torch.Tensor, row: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`rows`, each of `row` numbers, of a layer's `cache` `[blocks, kv_heads, block_size, size]`: `[kv_heads,
        token slots, size]`.
        """
        kv_heads, size = self.spec.num_kv_heads, cache.shape[-1]
        hnd = self.layout is PageLayout.HND
        table = (cache if hnd else cache.transpose(1, 2)).view(-1, row)
        found = torch.index_select(table, 0, rows, out=None if out is None else out.view(-1, row))
        return found.view(kv_heads, -1, size) if hnd else found.view(-1, kv_heads, size).transpose(0, 1)

    def block_bytes(self) -> list[torch.Tensor]:
        """The bytes of each tensor in place, `[layers, blocks, bytes]` uint8, in their order in memory."""
        in_memory = [t if self.layout is PageLayout.HND else t.transpose(2, 3) for t in self._tensors]
        return [tensor.flatten(2).view(torch.uint8) for tensor in in_memory]

    def copy_blocks(self, source: list[int], target: list[int]) -> None:
        """Copy whole blocks on every layer."""
        for tensor in self._tensors:
            tensor[:, target] = tensor[:, source]


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of `x` `[..., n]` as int8 and the scale `[...]` float32 that it is to be multiplied by: the row's
    largest magnitude / 127, so that 0 stays 0. A number that is not finite makes its row's scale so. The native
    kernels do the same.
    """
    x = x.float()
    magnitude = x.abs().amax(dim=-1)
    inverse = 127 / magnitude.clamp(min=_SMALLEST)
    return (x * inverse[..., None]).round().to(torch.int8), magnitude / 127
