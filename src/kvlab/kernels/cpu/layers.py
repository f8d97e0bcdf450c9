"""The layers of a decoder in one call: between its kernels no Python runs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from kvlab.kernels.cpu.interface import AttentionPart, LayerPart, LayersStep, MlpPart, Norm, PartKind
from kvlab.kernels.cpu.native import load

#: What each kind of part consists of. `LayersStep.times` gets the time at which each of these begins, part by part,
#: and at which the last one ends.
TIMED = {
    PartKind.INPUT_NORM: ("norm",),
    PartKind.RESIDUAL_NORM: ("norm",),
    PartKind.OUTPUT_NORM: ("norm",),
    PartKind.ATTENTION: ("qkv", "rotate_and_store", "attention", "out"),
    PartKind.MLP: ("gate_up", "down"),
}


class NativePart(NamedTuple):
    """One operation of a layer, and the structure that describes it."""

    kind: PartKind
    structure: Norm | AttentionPart | MlpPart


class Layers:
    """Layers that can be run, in the order of parts that layers.cpp states. The tensors that the parts point to
    have to outlive them.
    """

    def __init__(self, parts: Sequence[NativePart]) -> None:
        self._structures = [part.structure for part in parts]  # keeps them where the array points to
        self._parts = (LayerPart * len(parts))(
            *(LayerPart(part.kind, ctypes.addressof(part.structure)) for part in parts)
        )
        self._run = load().kvlab_layers
        #: Of each operation that is timed.
        self.timed = tuple(name for part in parts for name in TIMED[part.kind])

    def run(self, step: LayersStep) -> None:
        """Run a step through all parts."""
        self._run(ctypes.addressof(self._parts), len(self._parts), ctypes.addressof(step))
