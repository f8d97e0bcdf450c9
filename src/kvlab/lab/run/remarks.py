"""What a user should know of settings of simulated devices."""

from collections.abc import Iterator

from kvlab.config import HardwareConfig, ModelConfig, RunConfig
from kvlab.errors import shown
from kvlab.lab.run.plan import RunPlan
from kvlab.models.families import number_of
from kvlab.planning.devices import lacking_for_longest, lacking_for_steps, usual_server
from kvlab.simulation.eager import eager_note
from kvlab.simulation.timings import Timing
from kvlab.simulation.timings.base import LINKS, set_rates, unread_tiers

_FINDS_STATES = (0, 26)  # vLLM's version since which prefixes of models with states are found by default
_LINKED, _LINKED_IN_RACKS = 8, 72  # devices of a server, and of an NVL72 rack, that link_gb_s is of


def remarks_on_devices(plan: RunPlan, timing: Timing) -> Iterator[str]:
    """Settings of simulated devices that nothing reads, or that may mean something else to their framework."""
    config = plan.config
    if config.hardware is not None:
        yield from timing.unread(config.hardware, config.framework)
        yield from unread_tiers(config.kv, config.hardware)
        framework, lacking = config.framework, lacking_for_steps(config, config.hardware, plan.working)
        eager = eager_note(framework, plan.model.num_layers, includes_host=timing.includes_host)
        longest = lacking_for_longest(config, plan.pool)
        servers = _several_servers(config.hardware, config.executor.devices, timing)
        context = _unknown_context(config.model)
        states = _finds_no_prefixes(plan)
        yield from filter(None, (lacking, longest, framework.other_schedule, eager, servers, context, states))
    yield from _limits_of_all(config)


def _finds_no_prefixes(plan: RunPlan) -> str | None:
    """That a vLLM of this version finds no prefixes where layers have states, unless it is told to."""
    config, version = plan.config, plan.config.framework.vllm_key
    if not (plan.model.has_states and config.kv.prefix_sharing) or version is None or version >= _FINDS_STATES:
        return None
    of = f"{plan.model.states_called} of {config.model.name}: vLLM {config.framework.version}"
    return f"{of} finds no prefixes of such a model by default; set kv.prefix_sharing=false"


def _unknown_context(model: ModelConfig) -> str | None:
    """That a server takes as many tokens as the model has positions, where the model's file does not say that."""
    if model.max_seq_len != ModelConfig.max_seq_len:
        return None
    if model.path is None or number_of(model.path, model.architecture, "max_position_embeddings") is not None:
        return None
    text = f"model.max_seq_len={model.max_seq_len} unless it is set: {shown(model.path)} does not say how long"
    return f"{text} sequences may be (max_position_embeddings)"


def _several_servers(hardware: HardwareConfig, devices: int, timing: Timing) -> str | None:
    """That the roofline knows of no slower links among servers, where nobody set what they are."""
    most = _LINKED_IN_RACKS if hardware.name.startswith(("gb200", "gb300")) else _LINKED
    if devices <= most or timing.description != "roofline" or set_rates(hardware, LINKS):
        return None
    link = f"hardware.link_gb_s={hardware.link_gb_s:g}"
    text = f"timing roofline links all {devices} devices with {link}, as the {most} of one server"
    return f"{text}; links among servers are slower: set it to what theirs carry"


def _limits_of_all(config: RunConfig) -> Iterator[str]:
    """Limits of a step that were given for groups of devices, whose framework takes them for each group."""
    groups, name, usual = config.executor.attention_data_parallel, config.framework.name, usual_server(config)
    if usual is None or groups == 1 or name == "sglang" or config.scheduler.policy == "static":
        return  # SGLang's own options are of all groups, too
    tokens, sequences = config.scheduler.max_batched_tokens, config.scheduler.max_batch_size
    for key, value, unset in (
        ("max_batch_size", sequences, min(usual.max_batch_size, tokens)),
        ("max_batched_tokens", tokens, usual.max_batched_tokens),
    ):
        if value != unset:
            yield (
                f"scheduler.{key}={value} is of all {groups} groups of devices together; "
                f"where it is {name}'s limit of each, it is scheduler.{key}={groups * value}"
            )
