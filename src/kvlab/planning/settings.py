"""What of a configuration decides the memory of an engine, on this machine or on another."""

import os
import sys

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.registry import attention_backends, select_backend
from kvlab.config import EngineConfig, ExecutorConfig, KVConfig
from kvlab.config.executor import PACKED_WEIGHTS, SIMULATED_WEIGHTS
from kvlab.errors import ConfigError, DeviceError
from kvlab.kv.pools import POOLS
from kvlab.models.config import DecoderConfig, TransformersConfig, attention_specs, part_of
from kvlab.planning.memory import EngineSettings
from kvlab.planning.startup import startup

_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of Windows for its Linux, of AMD


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
    simulated `devices` of its kind: of groups that share the sequences, one has its part of a step.
    """
    groups = config.executor.attention_data_parallel
    return EngineSettings(
        dtype=config.executor.dtype,
        device=device,
        attention=attention,
        native=native,
        onednn=device == "cpu" and not native and config.executor.dtype == "bfloat16" and _packs_bfloat16(),
        weights=config.executor.weights,
        max_batched_tokens=-(-config.scheduler.max_batched_tokens // groups),
        max_batch_size=-(-config.scheduler.max_batch_size // groups),
        speculated=config.scheduler.speculation.most_tokens,
        max_seq_len=config.model.max_seq_len,
        block_size=POOLS.get(config.kv.backend).block_size_for(config.kv, config.model.max_seq_len),
        random_sampling=random_sampling,
        devices=devices,
        ranks=1 if devices else config.executor.tensor_parallel,
        startup=startup(config.framework, config.hardware),
    )


def _packs_bfloat16() -> bool:
    from kvlab.models.ops.torch_ops import packs_bfloat16  # this late, since it imports torch

    return packs_bfloat16()


def attention_elsewhere(config: EngineConfig, model: DecoderConfig, device: str) -> str:
    """The backend that a run on such a device takes. It may be another machine: there, kvlab's kernels work."""
    if config.attention.backend != "auto":
        return config.attention.backend
    dtype, formats = config.executor.dtype, config.kv_dtypes
    kernel, works = "cpu", dtype != "float16"
    if device == "cuda":
        # kvlab's kernel reads no format but its own; those of serving frameworks, which are simulated, read fp8.
        fp8 = config.hardware is not None
        kernel, works = "triton", all(stored == dtype or (fp8 and stored.startswith("fp8")) for stored in formats)
    works = works and not (isinstance(model, TransformersConfig) and model.has_sinks)
    own = set(ATTENTION_BACKENDS.names()) == ATTENTION_BACKENDS.own_names()
    if works and config.executor.kernels and not config.attention.prefer and own:
        return kernel  # kvlab's first choice; asking all the others would import torch
    among = attention_backends(kernels=config.executor.kernels, prefer=config.attention.prefer)
    specs = attention_specs(model, dtype, device, formats)
    return select_backend(specs, among=among, assume=kernel if works else None).name


def settings_elsewhere(
    config: EngineConfig, model: DecoderConfig, device: str, *, random_sampling: bool
) -> EngineSettings:
    """The settings of a "cpu" or "cuda" device that may be another machine's: there, kvlab's kernels work.

    Raises ConfigError for weights or K and V that such a device does not store.
    """
    executor = config.executor
    native = executor.kernels and device == "cpu" and executor.dtype in ("float32", "bfloat16")
    native = native and not isinstance(model, TransformersConfig)
    attention = attention_elsewhere(config, model, device)
    settings = memory_settings(config, device, attention, native=native, random_sampling=random_sampling)
    refuse_devices(executor, "needs the kind of the devices, as hardware=h100_sxm")
    if executor.tensor_parallel > 1 and device == "cuda":
        text = "needs the kind of the devices, as hardware=h100_sxm"
        raise ConfigError("executor.tensor_parallel", executor.tensor_parallel, text)
    refuse_split(executor.tensor_parallel, config.kv, model)
    if executor.weights in PACKED_WEIGHTS and not (native and executor.dtype == "bfloat16"):
        refuse_packed(executor.weights, model)
        import torch

        from kvlab.models.ops import select_ops

        # Says, as a run would, why there are no weights in a format of the kernels.
        select_ops(getattr(torch, executor.dtype), device, kernels=executor.kernels, weights=executor.weights)
    if device == "cpu":
        refuse_simulated(executor.weights)
    return settings


def refuse_packed(weights: str, model: DecoderConfig) -> None:
    """Raise ConfigError for weights in a format of kvlab's kernels, which transformers' models do not have."""
    if weights in PACKED_WEIGHTS and isinstance(model, TransformersConfig):
        text = f"is for kvlab's own decoder, and transformers runs {model.family}; use executor.weights=auto"
        raise ConfigError("executor.weights", weights, text)


def refuse_devices(executor: ExecutorConfig, reason: str) -> None:
    """Raise ConfigError for devices among which sequences or experts are divided."""
    for key in ("attention_data_parallel", "expert_parallel"):
        if (count := getattr(executor, key)) > 1:
            raise ConfigError(f"executor.{key}", count, reason)


def refuse_split(ranks: int, kv: KVConfig, model: DecoderConfig) -> None:
    """Raise ConfigError for what several ranks cannot compute or hold."""
    if ranks == 1:
        return
    if isinstance(model, TransformersConfig):
        text = f"divides kvlab's own decoders, and transformers runs {model.family} in one process; leave it at 1"
        raise ConfigError("executor.tensor_parallel", ranks, text)
    for key, room in (("kv.offload", kv.offload), ("kv.offload_disk", kv.offload_disk)):
        if room is not None:
            text = (
                f"copies the blocks of one process, and executor.tensor_parallel={ranks} has several; leave it null"
            )
            raise ConfigError(key, room, text)
    part_of(model, ranks)


def refuse_simulated(weights: str) -> None:
    """Raise ConfigError for weights in a format that nothing on this machine has, as fp8."""
    if weights in SIMULATED_WEIGHTS:
        hardware = "b200_sxm" if weights == "nvfp4" else "h100_sxm"
        text = f"is stored by simulated devices alone (executor=simulated hardware={hardware})"
        raise ConfigError("executor.weights", weights, f"{text}; here use int8 or auto")


def resolve_device(setting: str) -> str:
    """`cpu` or `cuda` for `auto`, `cpu` or `cuda`. Raises DeviceError where CUDA is asked for and absent."""
    available = setting != "cpu" and _finds_cuda()
    if setting == "cuda" and not available:
        raise DeviceError("executor.device=cuda: PyTorch finds no CUDA device here; use executor.device=cpu")
    return "cuda" if available else "cpu"


def _finds_cuda() -> bool:
    """Whether PyTorch finds a CUDA device. On Linux without a driver's device files it is not asked: importing it
    takes most of the time that a plan needs.
    """
    if sys.platform == "linux" and not any(map(os.path.exists, _DRIVER_FILES)):
        return False
    import torch

    return torch.cuda.is_available()
