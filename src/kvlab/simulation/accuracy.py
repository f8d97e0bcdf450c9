"""How far simulated deployments were from measured ones, so that a prediction says how sure it is.

Held against 358 deployments that nothing was fitted to (`experiments/simulated_vs_silicon/results.csv`, from which
`tests/simulation/test_accuracy.py` computes the same). An error is absolute and relative, of a mean over requests.
"""

from __future__ import annotations

from typing import NamedTuple


class Errors(NamedTuple):
    """Of a figure: which half of the deployments, and which nine of ten, were within; and what share of those on a
    device was within what nine of ten on other devices were. None: they are all on one device.
    """

    half: float
    most: float
    left_out: float | None


class Measured(NamedTuple):
    """The deployments of a framework."""

    devices: tuple[str, ...]
    rows: int
    tpot: Errors
    ttft: Errors


MEASURED = {
    "vllm": Measured(("h100_sxm", "h200_sxm"), 119, Errors(0.040, 0.224, 0.849), Errors(0.132, 0.339, 0.924)),
    "trtllm": Measured(("h100_sxm",), 176, Errors(0.044, 0.164, None), Errors(0.186, 0.614, None)),
    "sglang": Measured(("h100_sxm", "h200_sxm"), 63, Errors(0.150, 0.459, 0.556), Errors(0.637, 0.754, 0.635)),
}


def how_sure(framework: str, device: str) -> str | None:
    """In words, for steps timed by measured operations. None: no deployment of the framework was measured."""
    if (found := MEASURED.get(framework)) is None:
        return None
    figures = [
        f"{name} within {100 * errors.most:.0f} % (half of them {100 * errors.half:.0f})"
        for name, errors in (("tpot", found.tpot), ("ttft", found.ttft))
    ]
    text = f"nine of ten of {found.rows} measured {framework} deployments had {' and '.join(figures)}"
    if device in found.devices:
        return text
    shares = [found.tpot.left_out, found.ttft.left_out]
    if None in shares:
        return f"{text}; they are all on {found.devices[0]}, and none on {device}"
    left = " and ".join(f"{100 * (share or 0):.0f} %" for share in shares)
    return f"{text}; none is on {device}, and of a device left out {left} were as near"
