"""What the matrices of a published mixture of experts are stored in."""

from collections.abc import Mapping
from typing import Any

from kvlab.errors import ConfigError
from kvlab.models.values import Values

FP8_BLOCK = 128  # numbers on a side of the square that has one scale
_METHODS = {"mxfp4": "mxfp4", "fp8": "fp8_block"}
_INT4 = {128: "int4_wo", 32: "int4_wo_g32"}  # by the numbers that share a scale


def checkpoint_format(values: Values) -> str | None:
    """What the matrices of a mixture's checkpoint are stored in, by its `quantization_config`: all of them in
    `fp8_block`, or the experts alone in another format; None: in its dtype. Raises ConfigError for what is unknown.
    """
    asked = values("quantization_config")
    if asked is None:
        return None
    method = asked.get("quant_method") if isinstance(asked, Mapping) else asked
    if method == "compressed-tensors":
        return _int4_experts(asked)
    block = asked.get("weight_block_size", [FP8_BLOCK] * 2) if isinstance(asked, Mapping) else None
    if method not in _METHODS or (method == "fp8" and list(block or ()) != [FP8_BLOCK] * 2):
        known = f"known: mxfp4, and fp8 in blocks of {FP8_BLOCK} x {FP8_BLOCK}; or set executor.weights"
        raise ConfigError("quantization_config", method, f"unknown; {known}, and leave it out")
    return _METHODS[method]


def _int4_experts(asked: Any) -> str:
    """The format of a checkpoint of compressed-tensors whose experts alone are quantised (Kimi K2.5)."""
    try:
        weights, ignored = asked["config_groups"]["group_0"]["weights"], " ".join(asked["ignore"])
        stored = _INT4[weights["group_size"]] if (weights["num_bits"], weights["type"]) == (4, "int") else None
    except (KeyError, TypeError):
        stored, ignored = None, ""
    if stored is None or not all(part in ignored for part in ("self_attn", "shared_experts")):
        known = f"known: experts alone in 4-bit integers, {' or '.join(map(str, _INT4))} of which share a scale"
        text = f"{known}; or set executor.weights, and leave it out"
        raise ConfigError("quantization_config", "compressed-tensors", text)
    return stored
