"""Tables of measured operations: the optional package `aiconfigurator-core` (NVIDIA, Apache-2.0).

It carries times of GEMMs, attention and collectives on devices, for versions of serving frameworks, and
interpolates between them. Nothing of it is imported before tables are opened, and it uses no network.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import chain
from math import log
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.config import FrameworkConfig, HardwareConfig
from kvlab.config.framework import version_key
from kvlab.errors import ConfigError, KvlabError
from kvlab.extras import install_command

SMALLEST = 128  # numbers of the smallest all-reduce that was measured
INSTEAD = "or take executor.timing=roofline"
_PACKAGE = "aiconfigurator_core"
_BOUND = "sol"  # the package's word for a time by bytes and operations
_OTHER_MAKE = "b60"  # not NVIDIA's: no stand-in for what is
_FRAMEWORKS = ("vllm", "sglang", "trtllm")
_COMMONEST = (32, 8)  # heads of queries, and of K and V
#: MiB of the largest all-reduce that vLLM ends in the norm behind it, by capability and number of devices, and
#: since when it does by itself (its allreduce_rms_fusion.py; vllm-project/vllm 34299).
_FUSED_MIB = {90: {2: 64.0, 4: 2.0, 8: 0.5}, 100: {2: 64.0, 4: 32.0, 8: 1.0}, 103: {2: 64.0, 4: 64.0, 8: 4.0}}
_FUSED_SINCE = (0, 17)


class StandIn(NamedTuple):
    """Operations that are taken from tables of other frameworks."""

    product: str  # type of those of the package's GEMMs
    frameworks: tuple[str, ...]  # the first that has such
    experts: tuple[str, ...]  # likewise of its MoEs with framework.expert_kernels=trtllm_gen, and what it lacks
    modules: str = ""  # the framework for latent attention as a whole, where that was measured with its launches


#: Whose operations stand for such of a type as a framework's tables have them. vLLM's products in fp8 by blocks
#: were measured with their launch, 55 us on a Hopper's host and 150 on a Blackwell's, which graphs do without; all
#: have DeepGEMM's kernels. TensorRT-LLM's in nvfp4 take 2.3 us for each 1,024 inputs, as long for 1,280 outputs as
#: for 10,240: those of a kernel that its tuner, which a server runs when it starts, leaves for others. The kernels
#: that TensorRT-LLM generates for experts on Blackwell were measured with SGLang in all types: its own tables have
#: CUTLASS's in nvfp4 beyond 128 tokens and DeepGEMM's in fp8; in mxfp4 times fp8 it has few divisions, vLLM none.
#: vLLM's latent attention has the launches of its kernels in it too, on all devices but B200: one token takes 87 us
#: on B300 and 45 on B200, TensorRT-LLM's 36 and 37.
_STAND_INS = {
    "vllm": StandIn("fp8_block", ("sglang", "trtllm"), (), "trtllm"),
    "trtllm": StandIn("nvfp4", ("sglang", "vllm"), ("nvfp4", "fp8_block")),
}
_GENERATED = 100  # least capability with those kernels
#: Tables with the kernels that framework.expert_kernels names for vLLM, on devices of less capability than that.
#: Those of 0.19.0 have Triton's on all devices, newer ones what a server chooses. FlashInfer's of CUTLASS are
#: TensorRT-LLM's, whose tables of a Hopper have no others.
_VLLM_EXPERTS = {"triton": ("vllm 0.19.0", 1000), "cutlass": ("trtllm", _GENERATED)}
_LAUNCHES_S = 20e-6  # what such a module takes more than another framework's, at least: on B200 14 us at most


class Compiled(NamedTuple):
    """Operations as the package evaluates them: the framework's own, and those that another's stand in for."""

    own: str
    others: tuple[tuple[Any, str], ...] = ()  # and what evaluates them


class UnmeasuredError(KvlabError, LookupError):
    """The tables do not hold an operation, nor any that could stand in for it."""


class MeasuredTables:
    """Operations that were measured on `hardware` with a version of a framework.

    `operations` holds the package's classes of them, and `types` its enumerations of types.
    """

    def __init__(self, hardware: HardwareConfig, framework: FrameworkConfig, tensor_parallel: int = 1) -> None:
        """Raises ConfigError, naming what would do, where the package or a table is missing."""
        logging.getLogger(_PACKAGE).setLevel(logging.CRITICAL)  # it warns of models that are none of ours
        databases, self._engine = _module("perf_database"), _module("engine")
        self.operations, self.types = _module("operations"), _module("common")
        systems = Path(databases.get_systems_paths()[0])
        name, tables = hardware.name, framework.tables
        if tables not in _FRAMEWORKS:
            raise ConfigError("framework.tables", tables, f"must be one of {', '.join(_FRAMEWORKS)}; {INSTEAD}")
        _check_device(hardware, systems, tables)
        slots = databases.get_version_slots(name, tables)
        versions = [slots[slot] for slot in ("previous", "current", "next") if slots.get(slot)]
        asked = framework.version or slots["current"]
        version = min(versions, key=lambda one: _apart(one, asked))
        self.name = f"{tables} {version} on {name}" + (f", the nearest to {asked}" if version != asked else "")
        self.framework, self.device = tables, name
        self._database = databases.get_database(name, tables, version)
        self._handle = self._links = _opened(name, tables, version)
        self._system: dict[str, Any] = databases.load_system_spec(name)
        capability = int(self._system["gpu"]["sm_version"])
        #: Whether experts have the kernels that TensorRT-LLM generates.
        self.is_generated = framework.expert_kernels == "trtllm_gen" and capability >= _GENERATED
        source, below = _VLLM_EXPERTS.get(framework.expert_kernels, ("", 0)) if tables == "vllm" else ("", 0)
        is_measured = capability < below and (systems / "data" / name / "moe" / source.replace(" ", "/")).is_dir()
        self._experts = source if is_measured else ""
        self.has_kernels = False  # whether experts were found with the kernels that the framework's settings name
        self.fused_bytes = _fused_mib(framework, capability, tensor_parallel) * 2**20
        # Collectives were measured with more versions than all else, and over PCIe differ most between them.
        measured = [path.name for path in (systems / "data" / name / "comm" / tables).glob("*.*")]
        links = min(measured, key=lambda one: _apart(one, asked), default=version)
        if tensor_parallel > 1 and framework.version and links != version:
            self._links = _opened(name, tables, links, allow_unlisted_version=True)
            self.name += f", links of {links}"

    def compile(self, operations: Sequence[Any]) -> Compiled:
        """Objects of `self.operations`, one after the other, as `seconds` takes them."""
        self._engine._resolve_attention_lane_orders(operations, self._database, None)
        make: Callable[[Sequence[Any]], str] = self._engine.build_ops_json
        whose: dict[str, list[Any]] = {}
        for operation in operations:
            whose.setdefault(self._instead(operation), []).append(operation)
        own = make(whose.pop("", []))
        return Compiled(own, tuple((self._other(name)[0], make(those)) for name, those in whose.items()))

    def _instead(self, operation: Any) -> str:
        """The framework whose measurements stand for this one's, with a version if not its newest; empty: none."""
        parts = [operation]
        if isinstance(operation, self.operations.OverlapOp):  # of experts and what is beside them
            parts = [part for part in operation._group_a if _kind(part) == "MoE"]
        if self._experts and any(_kind(part) == "MoE" and self._stands_in(self._experts, part) for part in parts):
            return self._experts
        if (stand_in := _STAND_INS.get(self.framework)) is None:
            return ""

        def is_of(part: Any) -> bool:
            if (kind := _kind(part)) == "GEMM":
                return _type(part) == stand_in.product
            if kind != "MoE" or not self.is_generated:
                return False
            return _type(part) in stand_in.experts or not self._holds(self._handle, part)

        if any(is_of(part) and self._stands_in(self._first, part) for part in parts):
            return self._first
        if stand_in.modules and _kind(operation) == "MLAModule" and self._is_launched(stand_in.modules, operation):
            return stand_in.modules
        return ""

    def _is_launched(self, framework: str, module: Any) -> bool:
        """Whether it was measured with the launches of its kernels, as far as another framework's tables tell."""
        one = (self._engine.build_ops_json([module]), 1, 1, 0, True)
        try:
            launches_s = self._seconds(self._handle, *one) - self._seconds(self._other(framework)[0], *one)
        except UnmeasuredError:
            return False
        return launches_s > _LAUNCHES_S and self._stands_in(framework, module)

    def _holds(self, handle: Any, operation: Any) -> bool:
        try:
            self._seconds(handle, self._engine.build_ops_json([operation]), 1, 1, 0, True)
        except UnmeasuredError:
            return False
        return True

    def _stands_in(self, framework: str, operation: Any) -> bool:
        """Whether the other framework's tables have it."""
        if not framework:
            return False
        handle, version = self._other(framework)
        if not self._holds(handle, operation):
            return False
        self.has_kernels |= _kind(operation) == "MoE"
        called = "experts" if framework == self._experts else _type(operation) or "latent attention"
        if (whose := f", {called} of {framework.split()[0]} {version}") not in self.name:
            self.name += whose
        return True

    @cached_property
    def _first(self) -> str:
        """The other framework that has such products; empty where none has."""
        mode, frameworks, *_ = _STAND_INS[self.framework]
        product = self.operations.GEMM("", 1, 1024, 1024, self.types.GEMMQuantMode[mode])
        for framework in frameworks:
            with suppress(UnmeasuredError):
                if self._holds(self._other(framework)[0], product):
                    return framework
        return ""

    def _other(self, framework: str) -> tuple[Any, str]:
        """Another framework's tables of this device, of its newest version unless it is named with one, and their
        version. Raises UnmeasuredError.
        """
        databases = _module("perf_database")
        framework, _, other = framework.partition(" ")
        if other:
            return _opened(self.device, framework, other, allow_unlisted_version=True), other
        version = databases.get_version_slots(self.device, framework).get("current")
        if version is None:
            raise UnmeasuredError(framework)
        return _opened(self.device, framework, version), version

    def seconds(self, spec: Compiled, batch: int, tokens: int, prefix: int = 0, *, prefill: bool) -> float:
        """Seconds of compiled operations for `batch` sequences: in a prefill each has `tokens` new tokens behind
        `prefix` cached ones; otherwise each has one, at a context of `tokens`. Raises UnmeasuredError.
        """
        seconds = self._seconds(self._handle, spec.own, batch, tokens, prefix, prefill)
        return seconds + sum(
            self._seconds(handle, others, batch, tokens, prefix, prefill) for handle, others in spec.others
        )

    def link_seconds(self, spec: Compiled, tokens: int) -> float:
        """Seconds of compiled collectives for a step of so many tokens, with the version whose collectives were
        measured that is nearest to the framework's; where that lacks them, as `seconds` has them.
        """
        try:
            return self._seconds(self._links, spec.own, 1, tokens, 0, True)
        except UnmeasuredError:
            return self.seconds(spec, 1, tokens, prefill=True)

    def exchange_seconds(self, spec: Compiled, across: Compiled, tokens: int) -> float:
        """Seconds of compiled collectives that were measured with the tables' own version alone, for so many tokens
        of a group. `across`: an all-reduce over the same links; where it takes longer with the framework's version,
        they do, too. Raises UnmeasuredError.
        """
        seconds = self.seconds(spec, 1, tokens, prefill=True)
        if self._links is self._handle:
            return seconds
        try:
            return seconds * self.link_seconds(across, tokens) / self.seconds(across, 1, tokens, prefill=True)
        except UnmeasuredError:
            return seconds

    def fused_link_seconds(self, spec: Compiled, tokens: int) -> float:
        """Of collectives that end in a norm: FlashInfer's kernels, which are TensorRT-LLM's and were measured with
        it. Raises UnmeasuredError where they were not on this device.
        """
        return self._seconds(self._fused, spec.own, 1, tokens, 0, True)

    @cached_property
    def _fused(self) -> Any:
        return self._other("trtllm")[0]

    def _seconds(self, handle: Any, *step: Any) -> float:
        return float(sum(part[1] for part in self._parts(handle, *step))) * 1e-3

    def _parts(self, handle: Any, spec: str, batch: int, tokens: int, prefix: int, prefill: bool) -> list[Any]:
        """Name, milliseconds, energy and source of each operation."""
        rows = batch * (tokens if prefill else 1)
        try:
            parts: list[Any] = handle.evaluate_ops_json(
                spec, is_context=prefill, batch_size=batch, s=tokens, prefix=prefix, x=rows
            )
        except (RuntimeError, ValueError) as error:
            raise UnmeasuredError(str(error)) from error
        return parts

    def has(self, operation: Any, *, prefill: bool) -> bool:
        """Whether an object of `self.operations` was measured, or one like it: kernels of states that were not have
        the package's bound of them instead.
        """
        spec = self.compile([operation])
        try:
            parts = [self._parts(*each, 1, 1, 0, prefill) for each in ((self._handle, spec.own), *spec.others)]
        except UnmeasuredError:
            return False
        return all(source != _BOUND for *_, source in chain(*parts))

    def prefill_type(self, kv_type: str) -> str:
        """The type in which prefill computes attention over K and V of that type: the same, where heads of the
        commonest shape were measured so, else bfloat16. Raises UnmeasuredError.
        """
        make, stored = self.operations.ContextAttention, self.types.KVCacheQuantMode[kv_type]
        for name in (kv_type, "bfloat16"):
            computed = self.types.FMHAQuantMode.__members__.get(name)
            if computed and self.has(make("", 1, *_COMMONEST, stored, computed, head_size=128), prefill=True):
                return name
        raise UnmeasuredError(kv_type)


def _kind(operation: Any) -> str:
    """The name of its class: those within others are of classes that the package's own are made from."""
    return type(operation).__name__


def _type(operation: Any) -> str:
    """What its matrices are in; empty for one without."""
    return str(getattr(getattr(operation, "_quant_mode", None), "name", ""))


@lru_cache(maxsize=16)
def _opened(device: str, framework: str, version: str, **how: bool) -> Any:
    """What evaluates operations by a version's tables: 0.3 s to make, and the same for all deployments."""
    databases = _module("perf_database")
    database = databases.get_database(device, framework, version, **how)
    return _module("engine").EngineHandle.for_database(database, systems_path=str(databases.get_systems_paths()[0]))


def _module(name: str) -> Any:
    try:
        return import_module(f"{_PACKAGE}.sdk.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_PACKAGE):
            raise
        text = f"needs the package aiconfigurator-core: {install_command('silicon')}, {INSTEAD}"
        raise ConfigError("executor.timing", "silicon", text) from None


def _fused_mib(framework: FrameworkConfig, capability: int, devices: int) -> float:
    if (given := framework.fused_allreduce_mib) is not None:
        return given if devices > 1 else 0.0
    version = framework.vllm_key
    if version is None or version < _FUSED_SINCE:
        return 0.0
    return _FUSED_MIB.get(capability, {}).get(devices, 0.0)


def _check_device(hardware: HardwareConfig, systems: Path, framework: str) -> None:
    """Raise ConfigError, naming the nearest, for a device without tables of the framework."""
    devices = list(_devices(systems, framework))
    if hardware.name not in devices:
        specs = {device: _module("perf_database").load_system_spec(device) for device in devices}
        nearest, known = min(devices, key=lambda device: _distance(hardware, specs[device])), ", ".join(devices)
        text = f"timing=silicon has {framework} on {known}; the nearest is {nearest}; {INSTEAD}"
        raise ConfigError("hardware", hardware.name, text)


def _devices(systems: Path, framework: str) -> Iterator[str]:
    """Devices on which what every dense model needs was measured."""
    for path in sorted((systems / "data").iterdir()):
        needed = (path / family / framework for family in ("gemm", "attention"))
        if path.name != _OTHER_MAKE and all(directory.is_dir() for directory in needed):
            yield path.name


def _apart(version: str, asked: str) -> tuple[int, ...]:
    """By how much two versions differ, to compare. Raises ConfigError for framework.version."""
    keys = version_key(version), version_key(asked)
    return (version != asked, *(abs(one - other) for one, other in zip(*keys, strict=False)))


def _distance(hardware: HardwareConfig, system: dict[str, Any]) -> float:
    """By how much a device of the tables differs in bandwidth and arithmetic."""
    device, flops = system["gpu"], hardware.tflops.get("bfloat16", 0) * 1e12
    distance = abs(log(hardware.bandwidth_gb_s * 1e9 / device["mem_bw"]))
    return distance + (abs(log(flops / device["bfloat16_tc_flops"])) if flops else 0)
