"""How many programs of a kernel a processor of a GPU holds at once, by CUDA's rules.

Limits: "Technical Specifications per Compute Capability" in the CUDA C++ Programming Guide. Registers are given to
warps in units of 256, shared memory to programs in units of 128 bytes, 1 KiB more for each from compute capability
8.0 on ("Occupancy Calculator", Nsight Compute).
"""

from __future__ import annotations

from typing import NamedTuple

#: Of a read from a GPU's memory under load. Idle ones take 280 ns on an H100 (arXiv 2402.13499); queues add to it.
ASSUMED_LATENCY_S = 800e-9
REGISTERS, TENSOR_MEMORY_COLUMNS = 65536, 512


class Limits(NamedTuple):
    """Of one processor (SM) of an architecture, and of a device that has it."""

    hardware: str  # in conf/hardware
    processors: int
    shared_bytes: int
    threads: int
    programs: int
    tensor_cores: str  # the instruction that its generation has for products of whole tiles


ARCHITECTURES = {
    80: Limits("a100_sxm", 108, 164 * 1024, 2048, 32, "mma.sync"),
    90: Limits("h100_sxm", 132, 228 * 1024, 2048, 32, "wgmma"),
    100: Limits("b200_sxm", 148, 228 * 1024, 2048, 32, "tcgen05"),
    120: Limits("rtx_pro_6000_server", 188, 100 * 1024, 1536, 24, "mma.sync"),
}


def programs_by_limit(
    limits: Limits, *, registers: int, warps: int, shared_bytes: int, tensor_columns: int = 0
) -> dict[str, int]:
    """Programs of `warps` warps at once by what they take of each thing; the least of these holds."""
    warp_registers = -(-registers * 32 // 256) * 256
    found = {
        "registers": REGISTERS // warp_registers // warps,
        "shared": limits.shared_bytes // (-(-shared_bytes // 128) * 128 + 1024),
        "threads": limits.threads // (32 * warps),
        "programs": limits.programs,
    }
    if tensor_columns:
        found["tensor memory"] = TENSOR_MEMORY_COLUMNS // tensor_columns
    return found


def bytes_to_keep_in_flight(limits: Limits, bandwidth: float) -> float:
    """By each processor, so that a device of `bandwidth` bytes a second is kept busy (Little's law)."""
    return bandwidth * ASSUMED_LATENCY_S / limits.processors
