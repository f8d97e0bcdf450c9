"""vllm: the score of vLLM's own balancer of data-parallel engines."""

from collections.abc import Sequence

from kvlab.fleet.base import Choice, ReplicaView, RoutedRequest, Router
from kvlab.fleet.routers import ROUTERS


@ROUTERS.register("vllm")
class Vllm(Router):
    """The lowest 4 x waiting + running of what its coordinator published last, every 100 ms, plus what was sent
    since (vLLM's `DPLBAsyncMPClient`).
    """

    load = "polled"

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
        return self.lowest(replicas, [4 * (view.waiting + view.sent_since) + view.running for view in replicas])
