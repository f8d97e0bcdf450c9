"""Head shapes of the model presets whose attention reads K and V of heads."""

from __future__ import annotations

from typing import NamedTuple

from experiments.gpu.sizes import ROOT, model
from kvlab.models.config import DecoderConfig
from kvlab.models.families import decoder_config
from kvlab.models.sparse import SparseConfig

_NOT_SERVED = ("checkpoint", "smollm2_135m")  # their shapes are in files that are not here


class Shape(NamedTuple):
    """`heads` and `kv_heads` are those of the first model that has the shape."""

    head_dim: int
    group: int  # query heads to a KV head
    window: int | None
    heads: int
    kv_heads: int

    def __str__(self) -> str:
        window = f", window {self.window:,}" if self.window else ""
        return f"{self.head_dim} x {self.group}{window}"


def shapes(models: list[str] | None = None) -> list[Shape]:
    """Each head size, group and window (or none) of presets once, without those of tests unless they are named."""
    names = models or [
        path.stem
        for path in sorted((ROOT / "conf/model").glob("*.yaml"))
        if not path.stem.endswith("_tiny") and path.stem not in _NOT_SERVED
    ]
    found: dict[tuple[int, int, bool], Shape] = {}
    for name in names:
        config: DecoderConfig = decoder_config(model(name), simulated=True)
        if isinstance(config, SparseConfig) and config.latent:
            continue
        for layer in config.layers:
            window, group = layer.sliding_window, config.num_heads // config.num_kv_heads
            shape = Shape(config.head_dim, group, window, config.num_heads, config.num_kv_heads)
            found.setdefault((shape.head_dim, group, window is not None), shape)
    return [found[key] for key in sorted(found)]
