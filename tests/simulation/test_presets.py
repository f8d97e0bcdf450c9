"""Presets of devices: every device that the tables hold, and data sheet and tables beside each other."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvlab.config import HardwareConfig, parse_bytes

PRESETS = Path(__file__).parents[2] / "conf" / "hardware"
BOUNDS = {"memory": 0.01, "bandwidth": 0.04, "bfloat16": 0.01, "fp8": 0.01, "fp4": 0.01, "links": 0.001}
# The driver reports less than the nominal size, which the tables have of the L4; of Intel's 8 lanes of PCIe 5 they
# have what the protocol leaves.
WIDER = {("l4", "memory"): 0.07, ("b60", "links"): 0.13}


@cache
def systems() -> dict[str, dict[str, Any]]:
    databases = pytest.importorskip("aiconfigurator_core.sdk.perf_database")
    folder = Path(databases.get_systems_paths()[0])
    return {path.name: databases.load_system_spec(path.name) for path in (folder / "data").iterdir()}


def test_every_device_of_the_tables_is_a_preset() -> None:
    assert set(systems()) <= {path.stem for path in PRESETS.glob("*.yaml")}


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_data_sheet_and_tables_agree(path: Path) -> None:
    if path.stem not in systems():
        pytest.skip("the tables do not hold it")
    preset, system = HardwareConfig(**yaml.safe_load(path.read_text(encoding="utf-8"))), systems()[path.stem]
    device = system["gpu"]
    assert preset.name == path.stem
    pairs = {
        "memory": (parse_bytes(preset.memory, key=""), device["mem_capacity"]),
        "bandwidth": (preset.bandwidth_gb_s * 1e9, device["mem_bw"]),
        "bfloat16": (preset.tflops["bfloat16"] * 1e12, device["bfloat16_tc_flops"]),
        "links": (preset.link_gb_s * 1e9, system["node"]["intra_node_bw"]),
    }
    for dtype in {"fp8", "fp4"} & set(preset.tflops):
        pairs[dtype] = preset.tflops[dtype] * 1e12, device[f"{dtype}_tc_flops"]
    assert ("fp4" in preset.tflops) == ("fp4_tc_flops" in device)
    for name, (sheet, table) in pairs.items():
        assert sheet == pytest.approx(table, rel=WIDER.get((path.stem, name), BOUNDS[name])), name
