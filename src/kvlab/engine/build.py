"""From settings to an engine: first what can be checked at no cost, then what takes memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvlab.attention.base import AttentionBackend, AttentionSpec, layout_of
from kvlab.attention.registry import attention_backends, select_backend
from kvlab.config import EngineConfig
from kvlab.config.executor import PACKED_WEIGHTS
from kvlab.engine.clock import Clock
from kvlab.engine.engine import Engine
from kvlab.engine.executors import EXECUTORS
from kvlab.engine.memory import EngineSettings, WeightBytes, WorkingMemory
from kvlab.engine.per_sequence import PerSequenceExecutor
from kvlab.engine.scheduler import build_scheduler
from kvlab.engine.step import Executor
from kvlab.engine.text import Detokenizer
from kvlab.errors import ConfigError, DeviceError
from kvlab.kv.groups import LayerGroup, layer_groups
from kvlab.kv.journal import BlockJournal
from kvlab.kv.pools import POOLS
from kvlab.kv.sizing import PoolSize, size_pool
from kvlab.kv.spec import INT4_GROUP, KVSpec
from kvlab.kv.tiers.build import build_offload
from kvlab.models.config import DecoderConfig, TransformersConfig
from kvlab.models.decoder import attention_specs
from kvlab.models.ops import torch_ops
from kvlab.models.ops.base import Ops
from kvlab.simulation.timings import Timing

if TYPE_CHECKING:
    from kvlab.engine.sampler import Sampler


class Kernels(NamedTuple):
    """What computes a model on this machine."""

    attention: AttentionBackend
    specs: tuple[AttentionSpec, ...]  # of each layer
    ops: Ops
    threads: int  # of the CPU


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """A checked engine: everything that is known before a byte of it is allocated.

    `device` is "cpu" or "cuda", where `kernels` compute; or the name of hardware that is simulated, with the bytes
    of `memory` that the engine may take.
    """

    config: EngineConfig
    device: str
    model: DecoderConfig
    weights: WeightBytes
    working: WorkingMemory
    pool: PoolSize
    kernels: Kernels | None
    memory: int | None  # None: what the device has left
    timing: Timing | None  # of simulated hardware; None: steps take the time that they take

    @property
    def chosen(self) -> dict[str, str | int]:
        """What was chosen for settings that are `auto`, and how steps are timed if they are not computed."""
        if self.timing is not None:
            return {"device": self.device, "timing": self.timing.description}
        attention, _, ops, threads = self.computed_by
        kernels = "transformers" if isinstance(self.model, TransformersConfig) else ops.name
        return {"attention": attention.name, "kernels": kernels, "device": self.device, "threads": threads}

    @property
    def weights_format(self) -> str:
        """How matrices are stored: `plain`, or as kvlab's kernels store them. `weights` counts 16 bits for what
        `executor.weights=auto` stores in 12, since the same plan is made for other machines.
        """
        if self.kernels is None or isinstance(self.model, TransformersConfig):
            return "plain"
        return self.kernels.ops.weights

    @property
    def computed_by(self) -> Kernels:
        """The kernels. Raises ConfigError for hardware that is simulated."""
        if self.kernels is None:
            raise ConfigError(
                "executor.kind", self.config.executor.kind, "computes nothing; use executor.kind=torch"
            )
        return self.kernels


def plan_engine(config: EngineConfig, *, random_sampling: bool = True) -> EnginePlan:
    """Check an engine's configuration, and compute what memory it needs. `random_sampling`: whether any request is
    not greedy, which needs more working memory.

    Raises CapacityError, ConfigError, BackendError or DeviceError for what cannot work.
    """
    return EXECUTORS.get(config.executor.kind).plan(config, random_sampling=random_sampling)


def memory_settings(
    config: EngineConfig,
    device: str,
    attention: str,
    *,
    native: bool,
    random_sampling: bool = True,
    devices: int | None = None,
) -> EngineSettings:
    """What of a configuration decides the memory of an engine with this attention backend, on this device or on
    simulated `devices` of its kind.
    """
    return EngineSettings(
        dtype=config.executor.dtype,
        device=device,
        attention=attention,
        native=native,
        onednn=device == "cpu" and torch_ops.packs_bfloat16(),
        weights=config.executor.weights,
        max_batched_tokens=config.scheduler.max_batched_tokens,
        max_batch_size=config.scheduler.max_batch_size,
        speculated=config.scheduler.speculation.most_tokens,
        max_seq_len=config.model.max_seq_len,
        block_size=POOLS.get(config.kv.backend).block_size_for(config.kv, config.model.max_seq_len),
        random_sampling=random_sampling,
        devices=devices,
    )


def attention_elsewhere(config: EngineConfig, model: DecoderConfig, device: str) -> str:
    """The backend that a run on such a device takes. It may be another machine: there, kvlab's kernels work."""
    if config.attention.backend != "auto":
        return config.attention.backend
    dtype, formats = config.executor.dtype, config.kv_dtypes
    kernel, works = "cpu", dtype != "float16"
    if device == "cuda":
        # kvlab's kernel reads no format but its own; those of serving frameworks, which are simulated, read fp8.
        fp8 = config.hardware is not None
        kernel, works = "triton", all(each == dtype or (fp8 and each.startswith("fp8")) for each in formats)
    among = attention_backends(kernels=config.executor.kernels, prefer=config.attention.prefer)
    specs = attention_specs(model, dtype, device, formats)
    return select_backend(specs, among=among, assume=kernel if works else None).name


def build_engine(
    plan: EnginePlan,
    *,
    detokenize: Detokenizer | None = None,
    journal: BlockJournal | None = None,
    sampler: Sampler | None = None,
    wrap: Callable[[Executor], Executor] | None = None,
    clock: Clock | None = None,
) -> Engine:
    """Load the weights, allocate the pool, put the engine together. Raises WeightsError or CapacityError.

    Block events go to the `journal`. `sampler` replaces the executor's own; `wrap` puts another executor around it,
    as one that injects faults; `clock` replaces the executor's.
    """
    config = plan.config
    execution = EXECUTORS.get(config.executor.kind).build(plan, sampler=sampler)
    size, identity = plan.pool, block_identity(plan, execution.weights)
    offload = build_offload(config.kv, size, execution.storage, links=execution.links, identity=identity)
    options: dict[str, Any] = {} if offload is None else {"offload": offload}  # a plugin's pool need not know them
    if size.groups:
        options |= {"groups": size.groups, "step_tokens": size.step_tokens}
    pool = POOLS.get(config.kv.backend).from_config(
        config.kv, size.num_blocks, config.model.max_seq_len, execution.storage, journal=journal, **options
    )
    executor = execution.executor
    if config.executor.batching == "per_sequence":
        executor = PerSequenceExecutor(executor)
    return Engine(
        pool,
        build_scheduler(config.scheduler),
        wrap(executor) if wrap is not None else executor,
        clock or execution.clock,
        eos_token_ids=plan.model.eos_token_ids,
        vocab_size=plan.model.vocab_size,
        detokenize=detokenize,
        journal=journal,
    )


def block_identity(plan: EnginePlan, weights: str) -> dict[str, str]:
    """What decides the numbers and the layout of a block of given tokens, by names that users know. `weights`: a
    digest of the model's.
    """
    config, kernels = plan.config, plan.kernels
    layout = "" if kernels is None else layout_of(kernels.attention)
    shapes = f"{plan.model} {kv_spec(config, plan.model)} {layout}"
    return {
        "model": config.model.name,
        "executor.dtype": config.executor.dtype,
        "executor.weights": config.executor.weights,
        "kv.dtype": config.kv_dtype,
        "kv.block_size": str(plan.pool.block_size),
        "weights": weights,
        "shapes": hashlib.sha256(shapes.encode()).hexdigest()[:16],
    }


def kv_spec(config: EngineConfig, model: DecoderConfig) -> KVSpec:
    """What the cache stores for a token, in groups of layers if some have a sliding window that sequences leave.

    Raises ConfigError for heads that a format cannot hold, where it saves nothing, and for what the groups refuse.
    """
    # Serving frameworks, which simulated devices stand for, have one scale in fp8 for a whole tensor.
    spec = replace(model.kv_spec(*config.kv_dtypes), tensor_scales=config.hardware is not None)
    plain = model.kv_spec(config.executor.dtype)
    for name, own, dtype in zip(
        ("key", "value"), (config.kv.key_dtype, config.kv.value_dtype), spec.dtypes, strict=True
    ):
        key = "kv.dtype" if own is None else f"kv.{name}_dtype"
        if dtype == "int4" and model.head_dim % INT4_GROUP:
            text = f"has a scale for every {INT4_GROUP} numbers, which heads of {model.head_dim} are no multiple of"
            raise ConfigError(key, dtype, f"{text}; use int8, fp8_e4m3 or auto")
        one = model.kv_spec(dtype).bytes_per_token
        if dtype != plain.dtype and one >= plain.bytes_per_token:
            text = f"with their scales, heads of {model.head_dim} numbers take {one} bytes per token"
            instead = f"in {plain.dtype} {plain.bytes_per_token}; use {key}=auto"
            raise ConfigError(key, dtype, f"{text} and {instead}")
    return replace(spec, groups=_groups(config, model))


def _groups(config: EngineConfig, model: DecoderConfig) -> tuple[LayerGroup, ...]:
    """Groups of the layers; (): all need all of a sequence. Raises ConfigError for what groups do not support."""
    groups = layer_groups([layer.sliding_window for layer in model.layers], config.model.max_seq_len)
    windows = [group.window for group in groups if group.window is not None]
    if not (config.kv.windows and windows and getattr(POOLS.get(config.kv.backend), "frees_windows", False)):
        return ()
    text = f"layers of {config.model.name} keep the last {min(windows):,} tokens; use kv.windows=false"
    if config.kv.pinned_share:
        raise ConfigError("kv.pinned_share", config.kv.pinned_share, f"pins whole prefixes, and {text}")
    if (mode := config.scheduler.preemption.mode) == "swap":
        raise ConfigError("scheduler.preemption.mode", mode, f"copies whole sequences, and {text}, or recompute")
    return groups


def planned_pool(config: EngineConfig, spec: KVSpec) -> PoolSize:
    """The pool's size. Raises CapacityError where not one block fits."""
    scheduler = config.scheduler
    return size_pool(
        config.kv,
        spec,
        max_batch_size=scheduler.max_batch_size,
        max_seq_len=config.model.max_seq_len,
        step_tokens=scheduler.step_tokens,
    )


def refuse_packed(config: EngineConfig, model: DecoderConfig) -> None:
    """Raise ConfigError for weights in a format of kvlab's kernels, which transformers' models do not have."""
    weights = config.executor.weights
    if weights in PACKED_WEIGHTS and isinstance(model, TransformersConfig):
        text = f"is for kvlab's own decoder, and transformers runs {model.family}; use executor.weights=auto"
        raise ConfigError("executor.weights", weights, text)


def refuse_fp8(config: EngineConfig) -> None:
    """Raise ConfigError for weights in fp8, which nothing on this machine has."""
    if config.executor.weights == "fp8":
        text = "is stored by simulated devices alone (executor=simulated hardware=h100_sxm)"
        raise ConfigError("executor.weights", "fp8", f"{text}; here use int8 or auto")


def resolve_device(setting: str) -> str:
    """`cpu` or `cuda` for `auto`, `cpu` or `cuda`. Raises DeviceError where CUDA is asked for and absent."""
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise DeviceError("executor.device=cuda: PyTorch finds no CUDA device here; use executor.device=cpu")
    return "cuda" if setting != "cpu" and available else "cpu"
