"""What to say of shapes and types that the tables of measured operations lack: what they have instead."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import hypot, log

from kvlab.errors import ConfigError
from kvlab.models.config import DecoderConfig
from kvlab.models.sparse import Division, SparseConfig
from kvlab.simulation.operations import measured_experts
from kvlab.simulation.tables import INSTEAD, MeasuredTables, UnmeasuredError

#: What the tables call the types of K and V.
KV_TYPES = {"bfloat16": "bfloat16", "float16": "bfloat16", "int8": "int8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}
_HEADS, _SIZES = (1, 2, 4, 8), (64, 128, 256)  # of K and V on a device, as models have them


def unmeasured(
    tables: MeasuredTables,
    name: str,
    model: DecoderConfig,
    devices: int,
    stored: tuple[str, str],
    weight_types: dict[str, str],
) -> ConfigError:
    """What the tables have instead of what they do not, of a model whose weights, and K and V are `stored` so."""
    make, types, (weights, kv) = tables.operations, tables.types, stored

    def has_weights(called: str) -> bool:
        return tables.has(make.GEMM("", 1, 1024, 1024, types.GEMMQuantMode[called]), prefill=True)

    def has_attention(called: str, heads: int = 8, size: int = 128) -> bool:
        mode = types.KVCacheQuantMode[called]
        return tables.has(make.GenerationAttention("", 1, heads, heads, mode, head_size=size), prefill=False)

    def instead(known: dict[str, str], has: Callable[[str], bool]) -> str:
        names = ", ".join(own for own, called in known.items() if has(called))
        return f"{tables.name} was measured with {names}; {INSTEAD}"

    if not has_weights(weight_types[weights]):
        return ConfigError("executor.weights", weights, instead(weight_types, has_weights))
    if not has_attention(KV_TYPES[kv]):
        return ConfigError("kv.dtype", kv, instead(KV_TYPES, has_attention))
    heads, size = max(1, model.num_kv_heads // devices), model.head_dim
    shapes = [shape for shape in product(_HEADS, _SIZES) if has_attention(KV_TYPES[kv], *shape)]
    near, near_size = min(shapes, key=lambda shape: hypot(log(shape[0] / heads), log(shape[1] / size)))
    text = f"{tables.name} was measured with {near} KV heads of {near_size} numbers on a device, and not with "
    return ConfigError("model", name, f"{text}{heads} of {size}; {INSTEAD}")


def unmeasured_sparse(
    tables: MeasuredTables, name: str, model: SparseConfig, stored: tuple[str, str, str], error: UnmeasuredError
) -> ConfigError:
    """The same of a mixture of experts, whose matrices, experts, and K and V are `stored` so, and of a model whose
    states gave the `error`.
    """
    if str(error) == model.states_called:
        text = f"{tables.name} was not measured with {error} of its shape on a device; {INSTEAD}"
        return ConfigError("model", name, text)
    division, (weights, experts, kv) = model.division, stored

    def is_measured(division: Division) -> bool:
        try:
            measured_experts(tables, replace(model, division=division), experts)
        except UnmeasuredError:
            return False
        return True

    if is_measured(division):
        text = f"{tables.name} was not measured with its attention in {weights} with K and V in {kv}"
        return ConfigError(
            "model", name, f"{text}, {model.num_heads // division.tensor} heads on a device; {INSTEAD}"
        )
    counts = [count for count in (1 << power for power in range(10)) if division.devices % count == 0]
    others = [count for count in counts if is_measured(division._replace(experts=count))]
    text = f"{tables.name} was not measured with experts of {name} in {experts}"
    if not others:
        return ConfigError("model", name, f"{text} on {division.devices} devices; {INSTEAD}")
    known = " or ".join(map(str, others))
    text = f"{text} that are divided so; with executor.tensor_parallel={division.tensor} it was with {known}"
    return ConfigError("executor.expert_parallel", division.experts, f"{text}; {INSTEAD}")
