"""How K and V are stored: the readable definition of each format, which the native kernels compute as well.

A row is one token's head. int8 and fp8 take a byte per number, and each row has a float32 scale beside it: its
largest magnitude becomes the largest number of the format. int4 takes 18 bytes for 32 numbers (Q4_0 of llama.cpp
with a scale in bfloat16): the scale, then two numbers to a byte.

A scale per row needs no calibration and cannot overflow. One per head would have to be known before the first
token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvlab.kv.spec import INT4_GROUP, INT4_GROUP_BYTES

_SMALLEST = 1e-30  # a largest magnitude below this counts as 0
_HALF = INT4_GROUP // 2

Packed = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A format. `pack` turns rows `[..., n]` into what is stored, `[..., bytes or numbers]`, and the rows' scales
    `[...]` float32, or None where there are none apart from the numbers. `unpack` turns them back, into float32.

    Rows with a number that is not finite come back as NaN.
    """

    dtype: torch.dtype  # of what is stored
    pack: Callable[[torch.Tensor], Packed]
    unpack: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]

    @property
    def is_plain(self) -> bool:
        """Whether what is stored is the numbers themselves."""
        return self.pack is _as_it_is


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of `x` `[..., n]` as int8 and the scale `[...]` float32 that it is to be multiplied by: the row's
    largest magnitude / 127, so that 0 stays 0. A number that is not finite makes its row's scale so. The native
    kernels do the same.
    """
    scaled, scales = _scaled(x, 127)
    return scaled.round().to(torch.int8), scales


def _scaled(x: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of which the largest magnitude is `largest`, and their scales."""
    x = x.float()
    magnitude = x.abs().amax(dim=-1)
    return x * (largest / magnitude.clamp(min=_SMALLEST))[..., None], magnitude / largest


def _fp8(dtype: torch.dtype) -> KVFormat:
    """Without subnormal numbers: what is below the smallest normal one is stored as 0."""
    info = torch.finfo(dtype)

    def pack(x: torch.Tensor) -> Packed:
        scaled, scales = _scaled(x, info.max)
        scaled = scaled.masked_fill(scaled.abs() < info.smallest_normal, 0)
        return scaled.clamp(-info.max, info.max).to(dtype), scales

    return KVFormat(dtype, pack, _times_scales)


def _pack_int4(x: torch.Tensor) -> Packed:
    """A group's scale makes its number of largest magnitude -8, so that all 16 steps are used."""
    groups = x.float().reshape(*x.shape[:-1], -1, INT4_GROUP)
    high, low = groups.amax(dim=-1), -groups.amin(dim=-1)
    most = torch.where(high >= low, high, -low)
    scales = (most / -8 + (groups * 0).sum(dim=-1)).bfloat16()
    inverse = torch.where(scales == 0, 0, 1 / scales.float())
    numbers = ((groups * inverse[..., None]).round().clamp(-8, 7) + 8).nan_to_num().to(torch.uint8)
    halves = numbers[..., :_HALF] | numbers[..., _HALF:] << 4
    return torch.cat([scales[..., None].contiguous().view(torch.uint8), halves], dim=-1).flatten(-2), None


def _unpack_int4(stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    groups = stored.reshape(*stored.shape[:-1], -1, INT4_GROUP_BYTES)
    halves = groups[..., 2:]
    numbers = torch.cat([halves & 15, halves >> 4], dim=-1).float() - 8
    return (numbers * groups[..., :2].contiguous().view(torch.bfloat16).float()).flatten(-2)


def _as_it_is(x: torch.Tensor) -> Packed:
    return x, None


def _times_scales(stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return stored.float() if scales is None else stored.float() * scales[..., None]


_PLAIN = ("float32", "bfloat16", "float16")

#: Every format by its name.
FORMATS = {
    **{name: KVFormat(getattr(torch, name), _as_it_is, _times_scales) for name in _PLAIN},
    "int8": KVFormat(torch.int8, quantize, _times_scales),
    "fp8_e4m3": _fp8(torch.float8_e4m3fn),
    "fp8_e5m2": _fp8(torch.float8_e5m2),
    "int4": KVFormat(torch.uint8, _pack_int4, _unpack_int4),
}
