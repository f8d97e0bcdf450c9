"""What the compiler says of the attention kernels, for GPUs that are not here: no figure of this is measured.

    python -m experiments.gpu.compiled [--architectures 80,90,100,120] [--models qwen3_8b,...] [--write FILE]

Compiles the launches of every head shape of the presets. Exit status 1 if a kernel spills registers, copies fewer
than 16 bytes at once, leaves room for one program on a processor, or does without its generation's tensor cores.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from experiments.gpu.occupancy import ARCHITECTURES, bytes_to_keep_in_flight, programs_by_limit
from experiments.gpu.predicted import device, times
from experiments.gpu.shapes import Shape, shapes
from kvlab.kernels.triton.decode import paged_decode
from kvlab.kernels.triton.prefill import paged_prefill

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
BLOCK_SIZE = 16
COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)")
PRODUCT = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")


class NoGpu:
    """As much of a driver as compiling asks for."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)  # what is compiled is kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled(NamedTuple):
    """One kernel as compiled; counts are of instructions, not of what a run executes."""

    kernel: str
    registers: int
    spilled: int  # bytes of a thread
    shared_bytes: int
    warps: int
    tensor_columns: int
    copies: dict[int, int]  # asynchronous ones, by bytes
    products: dict[str, int]
    in_flight: int  # bytes of K and V that a program of decode has on their way while it computes


def compiled(function: JITFunction, kernel: Any, launch: dict[str, Any]) -> Compiled:
    """Of a launch with keywords `launch` that was compiled to `kernel`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    ptx, data = kernel.asm["ptx"], kernel.metadata
    tile = 4 * launch.get("TILE", 0) * launch.get("COLS", 0)  # of K and of V, 16 bits a number
    return Compiled(
        function.__name__,
        found["REG"],
        max(found["STACK"], found["LOCAL"]),
        data.shared,
        data.num_warps,
        getattr(data, "tmem_size", 0) or 0,
        dict(Counter(int(width, 0) for width in COPY.findall(ptx))),
        dict(Counter(PRODUCT.findall(ptx))),
        tile * max(1, data.num_stages - 2),
    )


def compile_launches(architecture: int, launch: Any) -> Iterator[Compiled]:
    """The kernels that `launch()` would launch, each compiled instead."""
    run, found = JITFunction.run, []

    def compile_instead(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(compiled(self, run(self, *args, grid=grid, warmup=True, **kwargs), kwargs))

    triton.runtime.driver.set_active(NoGpu(architecture))
    JITFunction.run = compile_instead
    try:
        launch()
    finally:
        JITFunction.run = run
    yield from found


def launches(shape: Shape) -> dict[str, Any]:
    """Attention of a shape in a step, as the backend launches it, by a name."""
    pool = torch.zeros(4, 2, BLOCK_SIZE, shape.head_dim, dtype=torch.bfloat16)
    cache = (pool, pool.clone(), torch.zeros(3, 40, dtype=torch.int32), torch.full((3,), 9, dtype=torch.int32))
    q = torch.zeros(400, 2 * shape.group, shape.head_dim, dtype=torch.bfloat16)
    starts = torch.tensor([0, 1, 101, 400], dtype=torch.int32)
    options: dict[str, Any] = {"scale": 0.1, "window": shape.window}
    return {
        "decode": partial(paged_decode, q[:3], *cache, **options),
        "decode, split": partial(paged_decode, q[:3], *cache, split_tokens=16, **options),
        "prefill": partial(paged_prefill, q, *cache, starts, least=2, **options),
        "prefill, short": partial(paged_prefill, q[:9], *cache, starts, **options),
    }


class Line(NamedTuple):
    architecture: int
    shape: Shape
    launch: str
    compiled: Compiled

    @property
    def programs(self) -> dict[str, int]:
        """At once on a processor, by each limit."""
        one = self.compiled
        return programs_by_limit(
            ARCHITECTURES[self.architecture],
            registers=one.registers,
            warps=one.warps,
            shared_bytes=one.shared_bytes,
            tensor_columns=one.tensor_columns,
        )

    @property
    def faults(self) -> list[str]:
        """What the gates forbid."""
        one = self.compiled
        # 16 rows of a decode are too few for instructions that multiply 64.
        product = "mma.sync" if one.kernel == "_decode" else ARCHITECTURES[self.architecture].tensor_cores
        checks = {
            f"spills {one.spilled} bytes": one.spilled > 0,
            f"copies by {one.copies}": bool(one.copies.keys() - {16}),
            # Tensor memory is given in powers of two: heads of 256 and their scores take all of it.
            "one program": min(count for name, count in self.programs.items() if name != "tensor memory") < 2,
            f"multiplies by {one.products}": one.kernel != "_combine"
            and not all(name.startswith(product) for name in one.products or ["none"]),
        }
        return [what for what, wrong in checks.items() if wrong]


def compile_shapes(architecture: int, chosen: list[Shape]) -> list[Line]:
    return [
        Line(architecture, shape, name, one)
        for shape in chosen
        for name, launch in launches(shape).items()
        for one in compile_launches(architecture, launch)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", default=",".join(map(str, ARCHITECTURES)))
    parser.add_argument("--models", help="presets; without: all")
    parser.add_argument("--write", type=Path, help="where the tables go; without: here")
    options = parser.parse_args()
    chosen = shapes(options.models and options.models.split(","))
    architectures = [int(one) for one in options.architectures.split(",")]
    if len(architectures) == 1:
        lines = compile_shapes(architectures[0], chosen)
    else:
        with ProcessPoolExecutor(2, get_context("spawn")) as pool:
            done = pool.map(compile_shapes, architectures, [chosen] * len(architectures))
            lines = [line for found in done for line in found]
    text = "\n".join([*report(lines), "", *times(architectures, chosen)]) + "\n"
    if options.write:
        options.write.write_text(text)
    else:
        print(text)
    faults = [
        f"{one.architecture} {one.shape}, {one.launch}: {', '.join(one.faults)}" for one in lines if one.faults
    ]
    print(*faults, f"{len(lines)} kernels, {len(faults)} beyond a gate", sep="\n", file=sys.stderr)
    return 1 if faults else 0


def report(lines: list[Line]) -> Iterator[str]:
    yield "# What the compiler says of the attention kernels"
    yield ""
    yield (
        f"Compiled by triton {triton.__version__} on a machine without a GPU, for bfloat16 in blocks of "
        f"{BLOCK_SIZE} tokens: `python -m experiments.gpu.compiled --write experiments/gpu/COMPILED.md`. **Nothing "
        "here was measured with these kernels.** How to read it: [README.md](README.md#what-a-compiler-proves)."
    )
    for architecture in dict.fromkeys(line.architecture for line in lines):
        limits = ARCHITECTURES[architecture]
        hardware = device(architecture)
        needed = bytes_to_keep_in_flight(limits, hardware.bandwidth_gb_s * 1e9)
        yield f"\n## sm_{architecture} ({limits.hardware})\n"
        yield f"To keep its memory busy, each processor needs {needed / 1024:.0f} KiB on their way.\n"
        yield (
            "| shape | kernel | registers | spilled | shared, bytes | warps | programs by registers | shared "
            "| threads | at once | copies of 16 bytes | others | tensor cores | KiB on their way |"
        )
        yield "|---" * 14 + "|"
        for line in lines:
            if line.architecture == architecture:
                yield _row(line)


def _row(line: Line) -> str:
    one, programs = line.compiled, line.programs
    bound, least = min(programs.items(), key=lambda item: item[1])
    by = ", ".join(f"{name} {count}" for name, count in one.products.items()) or "none"
    cells = [
        line.shape, f"{line.launch} (`{one.kernel}`)",
        one.registers, one.spilled, f"{one.shared_bytes:,}", one.warps,
        programs["registers"], programs["shared"], programs["threads"], f"{least} ({bound})",
        one.copies.get(16, 0), sum(count for width, count in one.copies.items() if width != 16), by,
        f"{one.in_flight * least / 1024:.0f}" if one.kernel == "_decode" else "",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    sys.exit(main())
