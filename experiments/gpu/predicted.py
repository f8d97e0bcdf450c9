"""Time of attention by the roofline, beside what was measured of vLLM's kernels: what there is to reach."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from experiments.gpu.occupancy import ARCHITECTURES
from experiments.gpu.shapes import Shape
from experiments.gpu.sizes import ROOT
from kvlab.config import FrameworkConfig, HardwareConfig
from kvlab.simulation.tables import MeasuredTables, UnmeasuredError

DECODE_SEQUENCES, CONTEXT = 64, 4096
PREFILL_SEQUENCES, PROMPT = 4, 2048


def device(architecture: int) -> HardwareConfig:
    """The device that stands for an architecture."""
    path = ROOT / "conf/hardware" / f"{ARCHITECTURES[architecture].hardware}.yaml"
    return HardwareConfig(**yaml.safe_load(path.read_text()))


def roofline(hardware: HardwareConfig, shape: Shape) -> tuple[float, float]:
    """Seconds of one layer's decode and prefill if they take K and V from memory, and multiply, at the share of the
    device's rates that `executor.timing=roofline` gives it.
    """
    bandwidth = hardware.bandwidth_gb_s * 1e9 * hardware.bandwidth_efficiency
    flops = hardware.tflops["bfloat16"] * 1e12 * hardware.compute_efficiency
    width = min(shape.window or CONTEXT, CONTEXT)
    read = DECODE_SEQUENCES * width * shape.kv_heads * shape.head_dim * 2 * 2
    seen = min(shape.window or PROMPT, PROMPT)
    pairs = seen * (seen + 1) // 2 + (PROMPT - seen) * seen
    multiplied = PREFILL_SEQUENCES * pairs * shape.heads * shape.head_dim * 4
    return read / bandwidth, multiplied / flops


def times(architectures: list[int], chosen: list[Shape]) -> Iterator[str]:
    """A table of both, in microseconds."""
    yield "## Times of one layer\n"
    yield (
        f"Decode of {DECODE_SEQUENCES} sequences at {CONTEXT:,} tokens, prefill of {PREFILL_SEQUENCES} prompts of "
        f"{PROMPT:,}, in µs. *Predicted* is the roofline of the device and says nothing of these kernels; "
        "*measured* are vLLM's kernels, from `aiconfigurator-core`: the bar for the day a GPU is here.\n"
    )
    yield "| device | shape | decode, predicted | vLLM, measured | prefill, predicted | vLLM, measured |"
    yield "|---" * 6 + "|"
    for architecture in architectures:
        hardware = device(architecture)
        tables = MeasuredTables(hardware, FrameworkConfig())
        for shape in chosen:
            decode, prefill = roofline(hardware, shape)
            measured = _measured(tables, shape, prefill=False), _measured(tables, shape, prefill=True)
            cells = f"{decode * 1e6:,.0f} | {measured[0]} | {prefill * 1e6:,.0f} | {measured[1]}"
            yield f"| {hardware.name} | {shape}, {shape.heads} heads | {cells} |"


def _measured(tables: MeasuredTables, shape: Shape, *, prefill: bool) -> str:
    make, types = tables.operations, tables.types
    stored = types.KVCacheQuantMode["bfloat16"]
    each = {"head_size": shape.head_dim, "window_size": shape.window or 0}
    heads = shape.heads, shape.kv_heads, stored
    try:
        if prefill:
            one = make.ContextAttention("prefill", 1, *heads, types.FMHAQuantMode["bfloat16"], **each)
            seconds = tables.seconds(tables.compile([one]), PREFILL_SEQUENCES, PROMPT, prefill=True)
        else:
            one = make.GenerationAttention("decode", 1, *heads, **each)
            seconds = tables.seconds(tables.compile([one]), DECODE_SEQUENCES, CONTEXT, prefill=False)
    except UnmeasuredError:
        return "none"
    return f"{seconds * 1e6:,.0f}"
