"""A device that is simulated: what its data sheet says, and what of it is reached."""

from dataclasses import dataclass, field

from kvlab.config.values import all_at_least, parse_bytes
from kvlab.errors import ConfigError


@dataclass
class HardwareConfig:
    """One device of a kind. Rates are those of its data sheet; the efficiencies say what kernels reach of them."""

    name: str = "???"  # what it is called in tables and runs
    memory: str = "???"  # of the device, as its driver reports it, as 81559MiB
    reserved: str = "0MiB"  # of its memory, what the driver keeps from programs
    bandwidth_gb_s: float = 0.0  # of its memory, in 10^9 bytes per second; for timing=roofline
    tflops: dict[str, float] = field(default_factory=dict)  # of dense matrix products, by dtype, in 10^12
    link_gb_s: float = 0.0  # to its peers, in one direction, in 10^9 bytes per second
    link_peers: int = 0  # devices with a link to each, link_gb_s in all (Infinity Fabric); 0: a switch, or no mesh
    links_shared: bool = False  # links meet in the host (PCIe without NVLink): pairs of devices share one path
    bandwidth_efficiency: float = 0.8  # share of the memory's bandwidth that kernels sustain, 0 to 1
    compute_efficiency: float = 0.7  # share of the arithmetic that matrix products sustain, 0 to 1
    host_link_gb_s: float = 0.0  # to the host's memory, in one direction, in 10^9 bytes per second; for kv.offload
    disk_read_gb_s: float = 6.8  # of the host's disk, in 10^9 bytes per second; for kv.offload_disk
    disk_write_gb_s: float = 4.0  # defaults: the data sheet of a PCIe 4 data centre SSD, Samsung's PM9A3
    power_watts: float = 0.0  # of the device or its board at most, by its data sheet: bounds the energy of a run
    link_efficiency: float = 0.7  # share of the links' bandwidth that collectives sustain, 0 to 1
    host_link_efficiency: float = 0.85  # share of the host link's bandwidth that copies of blocks sustain, 0 to 1
    cuda: bool = True  # NVIDIA's: FlashInfer and TensorRT-LLM run on it
    launch_us: float = 1.5  # from a kernel's end to the next one's start
    collective_us: float = 8.0  # before the first byte of an all-reduce moves
    host_link_us: float = 10.0  # before the first byte of a copy from the host's memory is there
    disk_us: float = 100.0  # before the first byte of a block on the disk is there

    def __post_init__(self) -> None:
        if self.usable_bytes <= 0:
            text = f"must be more than 0 bytes, and than hardware.reserved={self.reserved}"
            raise ConfigError("hardware.memory", self.memory, text)
        for dtype, rate in self.tflops.items():
            if rate <= 0:
                raise ConfigError(f"hardware.tflops.{dtype}", rate, "must be more than 0")
        shares = ("bandwidth_efficiency", "compute_efficiency", "link_efficiency", "host_link_efficiency")
        for name in shares:
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"hardware.{name}", getattr(self, name), "must be in (0, 1]")
        rates = ("bandwidth_gb_s", "link_gb_s", "host_link_gb_s", "disk_read_gb_s", "disk_write_gb_s")
        others = ("power_watts", "launch_us", "collective_us", "host_link_us", "disk_us")
        all_at_least("hardware", self, (*rates, *others, "link_peers"), 0)

    @property
    def usable_bytes(self) -> int:
        """What programs can have of the device's memory, as CUDA reports it."""
        memory, reserved = (
            parse_bytes(getattr(self, key), key=f"hardware.{key}") for key in ("memory", "reserved")
        )
        return memory - reserved

    def refuse_memory(self, asked: str | None) -> None:
        """Raise ConfigError for `memory=` beside hardware, which has its own."""
        if asked is not None:
            raise ConfigError("memory", asked, f"hardware={self.name} has {self.memory}; give one of them")
