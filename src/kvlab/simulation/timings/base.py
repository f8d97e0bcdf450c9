"""What a timing is: seconds of a simulated device for a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvlab.config import EngineConfig, FrameworkConfig, HardwareConfig, KVConfig
from kvlab.core import StepRecord
from kvlab.models.config import DecoderConfig
from kvlab.paths import CONF

if TYPE_CHECKING:
    from kvlab.kv.view import CacheView  # which imports torch

Counts = NDArray[np.int64]
#: Of a device, beside its arithmetic, what a roofline reads to time steps.
_RATES = ("bandwidth_gb_s", "bandwidth_efficiency", "compute_efficiency", "launch_us")
_OF_KERNELS = ("fp8_scales", "expert_kernels", "fused_allreduce_mib", "device_token_us")  # of a framework
_TO_HOST = ("host_link_gb_s", "host_link_efficiency", "host_link_us")
_TO_DISK = ("disk_read_gb_s", "disk_write_gb_s", "disk_us")
_COMPUTED = "computed"
LINKS = ("link_gb_s", "link_efficiency", "link_peers", "links_shared", "collective_us")


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on simulated devices, whose steps are to be timed."""

    config: EngineConfig
    model: DecoderConfig
    hardware: HardwareConfig
    bytes_per_weight: float  # in the mean
    body_bytes: int  # of the weights that every token reads, on all devices
    head_bytes: int  # of the output layer
    kv_bytes_per_token: int  # of all layers and devices
    expert_bytes: int = 0  # of the body: experts of mixtures, of which a step reads those that its tokens meet

    @property
    def devices(self) -> int:
        """Devices among which heads, matrices and experts are divided."""
        return self.config.executor.devices


class Timing(ABC):
    """Where the times of one deployment's steps come from."""

    source = "what was measured"  # of the times of its steps
    includes_host = False  # whether they have the host's share in them already
    because: str | None = None  # to know before there are figures: why not what `auto` prefers; how near it was

    @classmethod
    @abstractmethod
    def of(cls, deployment: Deployment) -> Timing:
        """Raises ConfigError, naming what would do, for a deployment that cannot be timed."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Where its times come from, in words: a run says so wherever it says that it is simulated."""

    def unread(self, hardware: HardwareConfig, framework: FrameworkConfig) -> list[str]:
        """A sentence for each setting that was set for other timings, and is in none of the times."""
        return []

    def _unread(self, settings: Sequence[str], reader: str) -> list[str]:
        """The sentences for settings, as key=value, of another timing, the `reader`."""
        because = f"has no effect here: steps take {self.source}, timing {self.description}"
        return [f"{setting} {because}; executor.timing={reader} reads it" for setting in settings]

    def remark(self, steps: Sequence[StepRecord]) -> str | None:
        """What a user should know of the times of a run's steps; None: nothing."""
        return None


class StepTiming(Timing):
    """Times each step by what it computes."""

    @abstractmethod
    def device_s(self, new_tokens: Counts, lengths: Counts, sampled: int) -> float:
        """Seconds of a step that computes `new_tokens` [B] of B sequences, which have `lengths` [B] tokens with
        them, and `sampled` rows of logits.
        """

    def step_s(self, new_tokens: Counts, view: CacheView, sampled: int) -> float:
        """The same of a step through a `view` of the cache, which says what blocks it reads."""
        return self.device_s(new_tokens, np.asarray(view.lengths, dtype=np.int64), sampled)

    def run_s(self, new_tokens: Counts, lengths: Counts, sampled: int) -> list[float] | None:
        """`step_s` of many steps, each with these `new_tokens` [B] and its row of `lengths` [steps, B]; None where
        that depends on the blocks too.
        """
        if type(self).step_s is not StepTiming.step_s:
            return None
        return [self.device_s(new_tokens, row, sampled) for row in lengths]


def set_rates(hardware: HardwareConfig, names: Sequence[str] = ()) -> list[str]:
    """What a roofline reads of the device that is other than in its file, as key=value: of these names, or all."""
    written = _known(_written("hardware", hardware.name))
    usual = _rates(asdict(HardwareConfig(hardware.name, hardware.memory)) | written)
    return [
        f"hardware.{name}={value if isinstance(value, bool) else format(value, 'g')}"
        for name, value in _rates(asdict(hardware)).items()
        if value != usual.get(name) and (not names or name in names)
    ]


def unread_tiers(kv: KVConfig, hardware: HardwareConfig) -> list[str]:
    """A sentence for each setting of the way to a tier that is other than in the device's file, where nothing is
    copied there. Nobody set what was measured here, or what is in a file that is not known.
    """
    written = _written("hardware", hardware.name)
    usual = asdict(HardwareConfig(hardware.name, hardware.memory)) | written
    tiers = (("kv.offload", kv.offload, _TO_HOST), ("kv.offload_disk", kv.offload_disk, _TO_DISK))
    return [
        f"hardware.{name}={getattr(hardware, name):g} has no effect here: it is read by {key}"
        for key, room, names in tiers
        for name in names
        if written and room is None and usual[name] not in (getattr(hardware, name), _COMPUTED)
    ]


def set_kernels(framework: FrameworkConfig, names: Sequence[str] = _OF_KERNELS) -> list[str]:
    """What measured operations read of the framework that is other than in its file, as key=value."""
    usual = asdict(FrameworkConfig()) | _known(_written("framework", framework.name))
    values = {name: getattr(framework, name) for name in names}
    return [f"framework.{name}={value}" for name, value in values.items() if value != usual[name]]


def _written(group: str, name: str) -> dict[str, Any]:
    """The settings of a file of a group, `_COMPUTED` where they are not known before something is measured."""
    import yaml  # this late: engines that compute do without it

    files = (folder / group / f"{name}.yaml" for folder in (CONF, Path("conf")))
    file = next(filter(Path.is_file, files), None)
    written: dict[str, Any] = yaml.safe_load(file.read_text("utf-8")) if file else {}
    return {name: _COMPUTED if "${" in str(value) else value for name, value in written.items()}


def _known(written: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in written.items() if value != _COMPUTED}


def _rates(settings: Mapping[str, Any]) -> dict[str, float]:
    arithmetic = {f"tflops.{dtype}": rate for dtype, rate in settings["tflops"].items()}
    return {name: settings[name] for name in (*_RATES, *LINKS)} | arithmetic
