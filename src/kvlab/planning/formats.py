"""Bytes of a matrix of weights, by what it is stored in.

fp8, int8      a byte for each number, and a float32 for each output
fp8_block      a byte for each number, and a float32 for each square of 128 x 128 (DeepSeek V3's checkpoint)
mxfp4          17 bytes for 32 numbers of a row: half a byte each, and an exponent that they share (gpt-oss)
nvfp4          9 bytes for 16 numbers of a row: half a byte each, and a scale in fp8 that they share; and a
               float32 for the matrix (NVIDIA's checkpoints)
int4_wo        66 bytes for 128 numbers of a row: half a byte each, and a scale of 16 bits that they share (GPTQ
               and AWQ); int4_wo_g32: 18 bytes for 32 of them (Kimi K2.5)
"""

from typing import NamedTuple

from kvlab.kv.spec import DTYPE_BYTES, SCALE_BYTES
from kvlab.models.checkpoint_format import FP8_BLOCK


class _Group(NamedTuple):
    """Numbers of four bits in a row that share a scale."""

    numbers: int
    scale: int  # bytes
    matrix: int = 0  # bytes of the matrix's own scale


_GROUPS = {
    "mxfp4": _Group(32, 1),
    "nvfp4": _Group(16, 1, SCALE_BYTES),
    "int4_wo": _Group(128, 2),
    "int4_wo_g32": _Group(32, 2),
}

#: Whose formats of 4 bits they are, and where their scales are.
DESCRIBED = {
    "nvfp4": "4 bits and a byte of scale for 16, as NVIDIA's checkpoints",
    "int4_wo": "4 bits and 2 bytes of scale for 128, as GPTQ and AWQ",
    "int4_wo_g32": "4 bits and 2 bytes of scale for 32, as the checkpoint",
}


def matrix_bytes(outputs: int, inputs: int, stored: str) -> tuple[int, int]:
    """Of the numbers of a matrix `[outputs, inputs]`, and of their scales. `stored`: one of these, or a dtype."""
    numbers = outputs * inputs
    if (group := _GROUPS.get(stored)) is not None:
        groups = outputs * -(-inputs // group.numbers)
        padded = groups * group.numbers if stored == "mxfp4" else numbers
        return -(-padded // 2), groups * group.scale + group.matrix
    if stored == "fp8_block":
        return numbers, SCALE_BYTES * -(-outputs // FP8_BLOCK) * -(-inputs // FP8_BLOCK)
    return numbers * DTYPE_BYTES[stored], SCALE_BYTES * outputs if stored in ("fp8", "int8") else 0
