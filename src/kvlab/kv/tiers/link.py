"""A link that blocks are copied over, as it is simulated."""

from dataclasses import dataclass

from kvlab.kv.tiers.base import Link


@dataclass(slots=True)
class SimulatedLink(Link):
    """One direction of a link of `bytes_per_s`: what is sent waits for what was sent before, and is there
    `latency_s` after its last byte has left. Latencies overlap with other transfers, as with commands in a queue.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    free_s: float = 0.0  # when it has sent all that it was given

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.latency_s >= 0:
            raise ValueError(f"a link of {self.bytes_per_s} bytes per second and {self.latency_s} s of latency")

    def transfer(self, ready_s: float, num_bytes: int) -> float:
        self.free_s = max(ready_s, self.free_s) + num_bytes / self.bytes_per_s
        return self.free_s + self.latency_s

    def seconds(self, num_bytes: int) -> float:
        return num_bytes / self.bytes_per_s + self.latency_s
