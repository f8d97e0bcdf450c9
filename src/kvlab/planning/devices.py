"""Simulated devices: whether a model fits on them, and what they leave for its cache."""

from dataclasses import replace
from itertools import count, takewhile

from kvlab.config import EngineConfig, HardwareConfig, format_bytes
from kvlab.config.executor import SIMULATED_WEIGHTS, W8A8, ExecutorConfig
from kvlab.config.server_defaults import ServerDefaults, defaults_of, state_multiple
from kvlab.errors import CapacityError, ConfigError
from kvlab.kv.sizing import PoolSize, longest_sequence
from kvlab.kv.spec import DTYPE_BYTES, KVSpec
from kvlab.models.config import DecoderConfig, TransformersConfig
from kvlab.models.families import decoder_config
from kvlab.models.sparse import SparseConfig
from kvlab.models.states import block_of_state
from kvlab.planning.cache import kv_spec
from kvlab.planning.memory import EngineSettings, WorkingMemory
from kvlab.planning.plan import MemoryPlan, plan_memory
from kvlab.planning.settings import attention_elsewhere, memory_settings
from kvlab.planning.startup import Startup, startup

_MOST_DEVICES = 64


def plan_on_devices(config: EngineConfig, hardware: HardwareConfig) -> MemoryPlan:
    """The memory of an engine on simulated devices. Raises ConfigError for a model that they cannot divide, and for
    weights in a format that they do not store.
    """
    if (weights := config.executor.weights) in ("compact", W8A8):
        known = ", ".join(("auto", "int8", *SIMULATED_WEIGHTS))
        text = f"is a format of kvlab's kernels for CPUs; simulated devices have one of {known}"
        raise ConfigError("executor.weights", weights, text)
    model = _divided(config, decoder_config(config.model, simulated=True), config.executor.tensor_parallel)
    devices, utilization = config.executor.devices, config.executor.memory_utilization
    spec = _with_copies(kv_spec(config, model), model, config.executor.tensor_parallel)
    _check_states(config, model)
    plan = plan_memory(model, spec, settings_of_devices(config, model))
    return replace(plan, memory=memory_of_devices(hardware, devices, utilization, plan))


def _divided(config: EngineConfig, model: DecoderConfig, devices: int) -> DecoderConfig:
    """The model among so many devices that share a sequence. Raises ConfigError for what they cannot divide."""
    executor, name = config.executor, config.model.name
    if isinstance(model, SparseConfig):
        return model.divided(executor, name, devices)
    for key in ("expert_parallel", "attention_data_parallel"):
        if (count := getattr(executor, key)) > 1:
            has = f"{name} has no experts"
            if isinstance(model, TransformersConfig) and model.counts.experts:
                has = f"those of {model.family} are divided by executor.tensor_parallel alone"
            text = f"is for mixtures of experts, and {has}; leave it at 1"
            raise ConfigError(f"executor.{key}", count, text)
    if model.num_heads % devices or (model.num_kv_heads % devices and devices % model.num_kv_heads):
        text = f"{name} has {model.num_heads} query heads and {model.num_kv_heads} KV heads, which it has to divide"
        raise ConfigError("executor.tensor_parallel", devices, text)
    return model


def _block_of_state(config: EngineConfig, model: DecoderConfig) -> int | None:
    """Tokens of the smallest block that holds a state of a layer; None: the model has none."""
    if not isinstance(model, SparseConfig) or model.states is None:
        return None
    return block_of_state(
        model.states,
        model.num_kv_heads,
        model.head_dim,
        config.executor.tensor_parallel,
        config.executor.dtype,
        config.kv_dtypes,
        multiple=state_multiple(config, flashinfer=model.states.flashinfer),
    )


def _check_states(config: EngineConfig, model: DecoderConfig) -> None:
    """Raise ConfigError where a block does not hold a layer's state, and for servers that keep states apart from
    their blocks.
    """
    if not isinstance(model, SparseConfig) or (states := model.states) is None:
        return
    if config.framework.name in ("sglang", "trtllm"):
        text = f"keeps the states of {config.model.name}'s {states.called} in a pool of their own, which is not"
        raise ConfigError("framework", config.framework.name, f"{text} planned; framework=vllm is")
    size, block = config.kv.block_size, _block_of_state(config, model) or 0
    if size < block:
        state = states.state_bytes(config.executor.tensor_parallel, DTYPE_BYTES[config.executor.dtype])
        text = f"a state of {config.model.name}'s {states.called} takes {format_bytes(state)} of each device, and"
        text += f" is in one block: kv.block_size={block}, which a vLLM server takes, is the least that holds it"
        text += f"; to compare sizes, take kv.block_size={block},{2 * block}, as sweep=block_size has smaller ones"
        raise ConfigError("kv.block_size", size, text)


def _with_copies(spec: KVSpec, model: DecoderConfig, devices: int) -> KVSpec:
    """With the copies of K and V that frameworks have among so many devices: of heads that these outnumber."""
    if isinstance(model, SparseConfig):
        return replace(spec, copies=model.kv_copies)
    return replace(spec, copies=max(1, devices // model.num_kv_heads))


def settings_of_devices(config: EngineConfig, model: DecoderConfig) -> EngineSettings:
    """What decides the memory of an engine on simulated devices. Serving frameworks size their caches before they
    know the requests: so that any of them may be sampled, with top-k and top-p.
    """
    attention, devices = attention_elsewhere(config, model, "cuda"), config.executor.devices
    return memory_settings(config, "cuda", attention, native=False, devices=devices)


def name_of_devices(hardware: HardwareConfig, devices: int) -> str:
    """In words, as 4 x h100_sxm."""
    return hardware.name if devices == 1 else f"{devices} x {hardware.name}"


def usual_server(config: EngineConfig) -> ServerDefaults | None:
    """What the server that is simulated has unless it is told otherwise; None: kvlab's own defaults."""
    model, scheduler = decoder_config(config.model, simulated=True), config.scheduler
    latent = isinstance(model, SparseConfig) and model.latent is not None
    return defaults_of(
        config,
        tokens=scheduler.max_batched_tokens,
        sequences=scheduler.max_batch_size,
        latent=latent,
        state_block=_block_of_state(config, model),
    )


def _shared_bytes(start: Startup, hardware: HardwareConfig, devices: int) -> int:
    """What the share of the memory is of, on each of so many devices."""
    return start.shared_bytes(hardware.usable_bytes, devices, linked=not hardware.links_shared)


def share_in_words(config: EngineConfig, hardware: HardwareConfig) -> str:
    """How much of its device's memory a server takes, and whose default that is unless it was set."""
    executor = config.executor
    share, start = executor.memory_utilization, startup(config.framework, config.hardware)
    shared = _shared_bytes(start, hardware, executor.devices)
    text = f"executor.memory_utilization={share:g} of {format_bytes(shared)}"
    text += "" if start.profiled else " free before the weights"
    text += " each" if executor.devices > 1 else ""
    if start.of_the_rest:
        text = f"executor.memory_utilization={share:g} of what weights and steps leave of {format_bytes(shared)}"
    server = usual_server(config)
    if share != (server or ExecutorConfig).memory_utilization:
        return text
    whose = "kvlab" if server is None else server.source.removesuffix("'s server")
    return f"{text} ({whose}'s default)"


def lacking_for_steps(config: EngineConfig, hardware: HardwareConfig, working: WorkingMemory) -> str | None:
    """That steps may need more than a share of the memory leaves them which is larger than the framework's own, in
    words; None: they do not, or the cache's size was given instead.
    """
    share, start = config.executor.memory_utilization, startup(config.framework, config.hardware)
    if start.profiled or config.kv.memory is not None or config.kv.num_blocks is not None:
        return None
    usual = usual_server(config)
    if usual is None or share <= usual.memory_utilization:
        return None
    shared = _shared_bytes(start, hardware, config.executor.devices)
    if working.peak <= (rest := int(shared * (1 - share))):
        return None
    text = f"executor.memory_utilization={share:g} leaves {format_bytes(rest)} of each device for steps, which may"
    return f"{text} need {format_bytes(working.peak)}: a server would run out of memory; take a smaller share"


def lacking_for_longest(config: EngineConfig, pool: PoolSize) -> str | None:
    """That the pool does not hold a sequence as long as `model.max_seq_len`, with which vLLM refuses to start, in
    words; None: it does, no vLLM is simulated, or the cache's size was given instead.
    """
    if config.kv.memory is not None or config.kv.num_blocks is not None:
        return None
    longest = config.model.max_seq_len
    is_vllm = config.hardware is not None and config.framework.name.startswith("vllm")
    pool = replace(pool, ahead=False)  # vLLM counts one step beside a window
    if not is_vllm or usual_server(config) is None or pool.most_blocks(longest) <= pool.blocks_of_a_part:
        return None
    fits, block = longest_sequence(pool, longest), pool.block_size * pool.bytes_per_slot
    needed, there = pool.most_blocks(longest) * block, pool.blocks_of_a_part * block
    text = f"model.max_seq_len={longest}: one sequence of so many tokens needs {format_bytes(needed)} of KV cache"
    text += f", and there are {format_bytes(there)}" + (" for each group" if pool.parts > 1 else "")
    does = f"model.max_seq_len={fits} would (--max-model-len)" if fits else "take more devices"
    return f"{text}: a vLLM server would not start; {does}"


def memory_of_devices(hardware: HardwareConfig, devices: int, utilization: float, plan: MemoryPlan) -> int:
    """Bytes on all devices together for weights, cache and steps, which need their working memory on each device:
    counted here is that of one.
    """
    start = plan.settings.startup
    shared = _shared_bytes(start, hardware, devices)
    others = (devices - 1) * plan.taken
    if not start.of_the_rest:
        return devices * int(shared * utilization) - others
    whole = devices * shared - others
    return whole - int(max(plan.left(whole), 0) * (1 - utilization))


def _share_of(config: EngineConfig, devices: int) -> float:
    """How much of its device's memory a server takes with so many that share a sequence: SGLang's default goes by
    all its devices.
    """
    own, other = config.executor, replace(config.executor, tensor_parallel=devices)
    usual, then = usual_server(config), usual_server(replace(config, executor=other))
    if usual is None or then is None or own.memory_utilization != usual.memory_utilization:
        return own.memory_utilization
    return then.memory_utilization


def check_devices(config: EngineConfig, hardware: HardwareConfig, plan: MemoryPlan) -> None:
    """Raise CapacityError, saying how many devices would do, unless one block fits beside weights and steps."""
    model, executor, size = plan.model, config.executor, config.kv.block_size

    def left(devices: int) -> int:
        """With so many that share a sequence. Raises ConfigError for what they cannot divide."""
        divided = _divided(config, model, devices)
        spec = _with_copies(plan.spec, divided, devices)
        every = devices * executor.attention_data_parallel
        on_so_many = plan_memory(divided, spec, replace(plan.settings, devices=every))
        memory = memory_of_devices(hardware, every, _share_of(config, devices), on_so_many)
        return on_so_many.left(memory) - size * spec.bytes_per_token

    def would_do(devices: int) -> bool:
        try:
            return left(devices) >= 0
        except ConfigError:
            return False

    devices, block = executor.tensor_parallel, size * plan.spec.bytes_per_token
    if left(devices) >= 0:
        return
    counts = takewhile(lambda count: count <= _MOST_DEVICES, (devices << times for times in count(1)))
    enough = next(filter(would_do, counts), None)
    advice = f"executor.tensor_parallel={enough} would do" if enough else "take a smaller model"
    memory, needed = max(0, plan.memory or 0), plan.weights.total + plan.taken + block
    parts = "weights, steps and one block" if plan.taken else "weights and one block"
    raise CapacityError(
        f"{config.model.name} needs {format_bytes(needed)} for {parts}, "
        f"and {hardware.memory} on each of {executor.devices} {hardware.name} are {format_bytes(memory)} at "
        f"executor.memory_utilization={executor.memory_utilization}, which is less; {advice}"
    )
