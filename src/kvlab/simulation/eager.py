"""What is known of the time of steps without CUDA graphs (`framework.cuda_graphs=false`).

The host then launches each kernel, and a step takes no less than that. What a layer costs it is its own: published
cases say how widely hosts differ, and how well one case of a host says others of it (`experiments/eager_steps`).
"""

from typing import NamedTuple

from kvlab.config import FrameworkConfig


class Published(NamedTuple):
    """Published times of eager steps that the host decides, and errors, predicted / published - 1."""

    hosts: int
    least_us: float  # of a layer, of the fastest host
    most_us: float
    between: float  # median size of the error where other hosts say one
    cases: int  # that another case of the same host says
    low: float
    high: float


PUBLISHED = Published(19, 196, 2_232, 0.39, 19, -0.32, 0.13)


def eager_note(framework: FrameworkConfig, layers: int, *, includes_host: bool) -> str | None:
    """What a user should know of the times of steps of so many layers, whose timing may have the host's share in it
    already; None: nothing.
    """
    if framework.cuda_graphs or includes_host:
        return None
    known, each = PUBLISHED, framework.eager_layer_us
    if each is not None:
        return (
            f"without CUDA graphs a step takes {layers * each / 1e3:.3g} ms or more: {layers} layers x "
            f"framework.eager_layer_us={each:g}. Predicted so from one case of its host, {known.cases} published "
            f"cases came out {-100 * known.low:.0f} % too short to {100 * known.high:.0f} % too long; deployments "
            "that were measured had graphs"
        )
    least, most = (layers * us / 1e3 for us in (known.least_us, known.most_us))
    return (
        "framework.cuda_graphs=false: steps are timed as with CUDA graphs, and are too short where the host takes "
        f"longer to launch them: for {layers} layers {least:.2g} to {most:.2g} ms on the hosts of {known.hosts} "
        f"published cases. The others predict one {100 * known.between:.0f} % off in the median, so set your own: "
        f"framework.eager_layer_us=N, the time between tokens of one request in us, / {layers}"
    )
