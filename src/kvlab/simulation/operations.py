"""The operations of a step on one device, as the tables of measured ones call them (kvlab.simulation.tables).

A mixture of experts has the GEMM of its router in 16 bits and an operation of its own: it was measured with tokens
that load experts unevenly, by a power law, on devices that divide experts by number and by matrices. Latent
attention was measured as a whole with its projections (vLLM), or with projections and absorption apart.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kvlab.errors import ConfigError
from kvlab.models.config import DecoderConfig, TransformersConfig
from kvlab.models.linear import Linear
from kvlab.models.mamba import Mamba2
from kvlab.models.sparse import Formats, Latent, SparseConfig
from kvlab.models.states import StateLayer
from kvlab.simulation.expert_load import FEWEST, POWER
from kvlab.simulation.tables import INSTEAD, MeasuredTables, UnmeasuredError

_OTHERWISE = 0.03  # share of the weights of layers that products of their own may have
FEW = 256  # tokens up to which shared experts are computed beside the others, on a stream of their own (vLLM)
VARIANCES = 4  # of q and of k in float32, as numbers of 16 bits
_STREAMED = 0.8  # share of the bandwidth that norms and gates reach, as in the package's own models;
_GATHERED = 0.3  # likewise the embedding
#: How uneven experts are loaded in the measurements that the package's models take: of those whose router is
#: corrected to level the load (DeepSeek V3's family, Nemotron H, MiniMax M3; M2 has the same), and of others.
_LEVELLED, _UNEVEN = "power_law_1.01", f"power_law_{POWER}"
_EVEN = "balanced"
#: Kernels of the gated delta rule, as the package calls them.
_GDN = {
    "generation": ("causal_conv1d_update", "fused_sigmoid_gating_delta_rule_update"),
    "context": ("causal_conv1d_fn", "chunk_gated_delta_rule"),
}
_PLAIN, _HALF = "bfloat16", 2  # bytes
_CHUNK = 128  # tokens that Mamba-2's kernels compute at once
_MXFP4 = ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8")  # activations in 16 bits, and in 8 as generated kernels have them


class Operations(NamedTuple):
    """Lists of the package's objects; `decode` and `prefill` of one layer."""

    linear: list[Any]  # of the step's tokens
    norms: list[Any]  # likewise those that an all-reduce may end in
    few: list[Any]  # the same for `FEW` of them or less
    links: list[Any]
    head: list[Any]
    decode: list[Any]
    prefill: list[Any]
    experts: Sequence[Any] = ()  # of the tokens of all groups of devices, where these share the sequences
    exchange: Sequence[Any] = ()  # of those of a group: what the experts get and give,
    across: Sequence[Any] = ()  # and an all-reduce of as many tokens over the same links
    variances: Sequence[Any] = ()  # all-reduces of `VARIANCES` numbers for each token
    uneven: Sequence[Any] = ()  # of those above, experts of which tokens meet fewer than were measured,
    even: Sequence[Any] = ()  # and the same measured with choices that meet as many experts as they can
    state_decode: Sequence[Any] = ()  # of all layers that have a state in place of K and V
    state_prefill: Sequence[Any] = ()


def _check_products(model: DecoderConfig) -> None:
    """Raise ConfigError for a decoder of transformers whose layers have others than those that are looked up."""
    if not isinstance(model, TransformersConfig):
        return
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    looked_up = model.num_layers * model.hidden_size * (heads + 3 * model.intermediate_size)
    if abs(model.counts.body - looked_up) > _OTHERWISE * looked_up:
        text = "timing=silicon looks up QKV, output, gate, up and down, and its layers have others"
        raise ConfigError("model.family", model.family, f"{text}; {INSTEAD}")


def operations(tables: MeasuredTables, model: DecoderConfig, devices: int, weights: str, kv: str) -> Operations:
    """Of a dense model among `devices`. Raises UnmeasuredError for a type of K and V, and ConfigError for
    layers with other products."""
    _check_products(model)
    make, types = tables.operations, tables.types
    hidden, layers, head_dim = model.hidden_size, model.num_layers, model.head_dim
    heads, kv_heads = model.num_heads // devices, max(1, model.num_kv_heads // devices)
    inner, vocabulary = model.intermediate_size // devices, model.vocab_size // devices
    mode = types.GEMMQuantMode[weights]
    norms = make.ElementWise("norms", 2 * layers, 2 * hidden, 2 * hidden, _STREAMED)
    linear = [
        make.Embedding("embedding", 1, vocabulary, hidden, _GATHERED),
        *([norms] if model.sandwich_norms else []),
        make.GEMM("qkv", layers, (heads + 2 * kv_heads) * head_dim, hidden, mode),
        make.GEMM("output", layers, hidden, heads * head_dim, mode, low_precision_input=True),
        *_feed_forward(make, layers, inner, hidden, mode),
    ]
    links = [make.CustomAllReduce("links", 2 * layers + 1, hidden, devices)]
    head = [make.GEMM("head", 1, vocabulary, hidden, types.GEMMQuantMode.bfloat16)]
    return Operations(linear, [norms], linear, links, head, *_attention(tables, model, heads, kv_heads, kv))


def sparse_operations(tables: MeasuredTables, model: SparseConfig, formats: Formats, kv: str) -> Operations:
    """Of a mixture of experts on the devices of its division; `formats` are types of the tables. Raises
    UnmeasuredError for a type of experts, or of K and V.
    """
    make, division, mixture = tables.operations, model.division, model.experts
    hidden, layers, tensor = model.hidden_size, model.num_layers, division.tensor
    modes = tables.types.GEMMQuantMode
    mode, plain, vocabulary = modes[formats.dense], modes.bfloat16, model.vocab_size // tensor
    shared = mixture.shared // tensor
    projections, decode, prefill = _sparse_attention(tables, model, formats, kv)
    states: list[list[Any]] = [[], []]
    if model.states is not None:
        projected, *states = _states(tables, model, model.states, formats)
        projections = [*projections, *projected]
    linear = [
        make.Embedding("embedding", 1, vocabulary, hidden, _GATHERED),
        *_feed_forward(make, model.dense_layers, model.intermediate_size // tensor, hidden, mode, mixture.inner),
        *projections,
    ]
    norms = [make.ElementWise("norms", model.num_parts, 2 * hidden, 2 * hidden, _STREAMED)]
    reduced = model.num_parts + 1 - (mixture.layers if division.data > 1 else 0)
    links = [make.CustomAllReduce("links", reduced, hidden, tensor)]
    head = [make.GEMM("head", 1, vocabulary, hidden, plain)]
    if not mixture.layers:  # all are dense
        return Operations(linear, norms, linear, links, head, decode, prefill, (), (), (), (), (), (), *states)
    router = make.GEMM("router", mixture.layers, mixture.count, hidden, plain)
    beside = _feed_forward(make, mixture.layers, shared, hidden, mode, mixture.inner)
    chosen = measured_experts(tables, model, formats.experts)
    if width := mixture.width:  # each device has the whole of the projections to it and back
        linear += [
            make.GEMM("narrow", mixture.layers, width, hidden, plain),
            make.GEMM("widen", mixture.layers, hidden, width, plain),
        ]
    variances = [make.CustomAllReduce("variances", layers, VARIANCES, tensor)] if _norms_all_heads(model) else []
    loads = _loads(tables, model, formats.experts, chosen)
    if division.data > 1:
        linear += [router, *beside]
        lists = linear, norms, linear, links, head, decode, prefill
        across = [make.CustomAllReduce("across", 1, hidden, division.devices)]
        return Operations(*lists, [chosen], _exchange(tables, model), across, variances, *loads, *states)
    few = [router, chosen]
    if beside:
        few = [make.OverlapOp("mixture", group_a=few, group_b=beside)]
    lists = [*linear, router, chosen, *beside], norms, [*linear, *few], links, head, decode, prefill
    return Operations(*lists, (), (), (), variances, *loads, *states)


def _norms_all_heads(model: SparseConfig) -> bool:
    """Whether the norms of q and of k are over all heads, also those of other devices."""
    return model.division.tensor > 1 and model.family == "minimax_m2"


def _loads(tables: MeasuredTables, model: SparseConfig, experts: str, chosen: Any) -> tuple[list[Any], list[Any]]:
    """The `uneven` and `even` of Operations, of the experts that were `chosen`."""
    if not model.experts.has_correction and model.experts.count >= FEWEST:
        with suppress(UnmeasuredError):
            return [chosen], [measured_experts(tables, model, experts, _EVEN)]
    return [], []


def _exchange(tables: MeasuredTables, model: SparseConfig) -> list[Any]:
    """What groups of devices give the experts, and get of them."""
    division, mixture = model.division, model.experts
    shape = (model.expert_width, mixture.active, mixture.count)
    placed = (division.expert_tensor, division.experts, division.data)
    return [
        tables.operations.MoEDispatch("experts", mixture.layers, *shape, *placed, before, backend=tables.framework)
        for before in (True, False)
    ]


def measured_experts(tables: MeasuredTables, model: SparseConfig, experts: str, load: str = "") -> Any:
    """The operation of a step's mixtures, with the `load` of the model's kind unless one is given. Raises
    UnmeasuredError where it was not measured with experts of this shape and type that are divided so.
    """
    make, division, mixture = tables.operations, model.division, model.experts
    modes = tables.types.MoEQuantMode.__members__
    shape = (model.expert_width, mixture.size, mixture.active, mixture.count)
    load = load or (_LEVELLED if mixture.has_correction else _UNEVEN)
    names = (_MXFP4[::-1] if tables.is_generated else _MXFP4) if experts == "mxfp4" else (experts,)
    for name in names:
        if name in modes:
            placed = (division.expert_tensor, division.experts, modes[name], load, 1)
            found = make.MoE("experts", mixture.layers, *shape, *placed, is_gated=mixture.has_gates)
            if tables.has(found, prefill=True):
                tables.has_kernels |= tables.is_generated and name == _MXFP4[1]
                return found
    raise UnmeasuredError(f"experts in {experts}")


def _feed_forward(make: Any, layers: int, size: int, hidden: int, mode: Any, inner: int = 2) -> list[Any]:
    """Of so many layers; `inner`: 2 with a gate, else 1."""
    if not layers or not size:
        return []
    return [
        make.GEMM("gate_up", layers, inner * size, hidden, mode),
        make.ElementWise("gate", layers, inner * size, size, _STREAMED),
        make.GEMM("down", layers, hidden, size, mode, low_precision_input=True),
    ]


def _attention(
    tables: MeasuredTables, model: DecoderConfig, heads: int, kv_heads: int, kv: str
) -> tuple[list[Any], list[Any]]:
    make, types = tables.operations, tables.types
    each = {"head_size": model.head_dim, "use_qk_norm": model.qk_norm}
    kv_type, computed = types.KVCacheQuantMode[kv], types.FMHAQuantMode[tables.prefill_type(kv)]
    decode = make.GenerationAttention("decode", 1, heads, kv_heads, kv_type, **each)
    return [decode], [make.ContextAttention("prefill", 1, heads, kv_heads, kv_type, computed, **each)]


def _sparse_attention(
    tables: MeasuredTables, model: SparseConfig, formats: Formats, kv: str
) -> tuple[list[Any], list[Any], list[Any]]:
    """Projections of all tokens, and what is left of a layer in decode and in prefill."""
    make, modes, hidden = tables.operations, tables.types.GEMMQuantMode, model.hidden_size
    layers = model.attention_layers
    heads, kv_heads = model.num_heads // model.division.tensor, max(1, model.num_kv_heads // model.division.tensor)
    if model.latent is not None:
        return _latent_attention(tables, model, model.latent, heads, formats, kv)
    decode, prefill = _attention(tables, model, heads, kv_heads, kv)
    inner, keys = heads * model.head_dim, kv_heads * model.head_dim
    projections = [
        make.GEMM("qkv", layers, (1 + model.has_gate) * inner + 2 * keys, hidden, modes[formats.attention]),
        make.GEMM("output", layers, hidden, inner, modes[formats.output], low_precision_input=True),
    ]
    if _norms_all_heads(model):
        projections.append(make.ElementWise("variances", 2 * layers, inner + keys, 2, _STREAMED))
    return projections, decode, prefill


def _latent_attention(
    tables: MeasuredTables, model: SparseConfig, latent: Latent, heads: int, formats: Formats, kv: str
) -> tuple[list[Any], list[Any], list[Any]]:
    """Projections of all tokens, and what is left of a layer in decode and in prefill. Measured as a whole, the
    output's projection is in the type of the others.
    """
    make, types = tables.operations, tables.types
    mode, kv_type = types.GEMMQuantMode[formats.attention], types.KVCacheQuantMode[kv]
    computed = types.FMHAQuantMode.bfloat16
    attend = make.GenerationMLA("decode", 1, heads, kv_type)
    if not tables.has(attend, prefill=False):
        whole = (heads, kv_type, computed, mode)
        decode, prefill = (
            make.MLAModule(name, 1, name == "prefill", *whole, native_num_heads=model.num_heads)
            for name in ("decode", "prefill")
        )
        return [], [decode], [prefill]
    plain = types.GEMMQuantMode.bfloat16
    absorb = [make.MLABmm("absorb", 1, heads, plain, if_pre=first) for first in (True, False)]
    spread = make.GEMM("spread", 1, heads * (latent.nope + latent.value), latent.rank, mode)
    attend_all = make.ContextMLA("prefill", 1, heads, kv_type, computed)
    rank, up = latent.query_rank or 0, heads * (latent.nope + latent.rope)
    down = rank + latent.rank + latent.rope + (0 if rank else up)
    projections = [
        make.GEMM("down", model.num_layers, down, model.hidden_size, mode),
        *([make.GEMM("queries", model.num_layers, up, rank, mode)] if rank else []),
        make.GEMM(
            "output", model.num_layers, model.hidden_size, heads * latent.value, types.GEMMQuantMode[formats.output]
        ),
    ]
    return projections, [absorb[0], attend, absorb[1]], [spread, attend_all]


def _states(
    tables: MeasuredTables, model: SparseConfig, states: StateLayer, formats: Formats
) -> tuple[list[Any], list[Any], list[Any]]:
    """Projections of all tokens, and what is left in decode and in prefill, of all layers of the kind. Raises
    UnmeasuredError.
    """
    make, modes, parts = tables.operations, tables.types.GEMMQuantMode, model.division.tensor
    layers, hidden = model.state_layers, model.hidden_size
    *projected, (_, read, part) = states.matrices(hidden)
    stored = formats._asdict()
    projections = [
        make.GEMM("read", layers, hidden, read // parts, modes[stored[part]], low_precision_input=True),
        *(
            # Those that are in 16 bits in every format are narrower than any that was measured.
            make.GEMM("states", layers, rows // parts, hidden, modes[stored.get(of, _PLAIN)], below_grid_sol=not of)
            for rows, _, of in projected
        ),
    ]
    match states:
        case Linear():
            return projections, *_delta_kernels(tables, layers, hidden, states, parts)
        case Mamba2():
            return projections, *_mamba_kernels(make, layers, states, parts)
    raise UnmeasuredError(states.called)


def _delta_kernels(
    tables: MeasuredTables, layers: int, hidden: int, linear: Linear, parts: int
) -> tuple[list[Any], list[Any]]:
    """In decode and in prefill. Raises UnmeasuredError."""
    heads = linear.key_heads // parts, linear.key_dim, linear.value_heads // parts, linear.value_dim
    make = tables.operations.GDNKernel
    found = {
        phase: [make(name, layers, name, phase, hidden, *heads, linear.kernel) for name in names]
        for phase, names in _GDN.items()
    }
    for phase, kernels in found.items():
        if not all(tables.has(kernel, prefill=phase == "context") for kernel in kernels):
            raise UnmeasuredError(linear.called)
    return found["generation"], found["context"]


def _mamba_kernels(make: Any, layers: int, mamba: Mamba2, parts: int) -> tuple[list[Any], list[Any]]:
    """In decode and in prefill, by what they read and write: of them the package has a prompt's convolution alone,
    undivided and with TensorRT-LLM. In decode that is the states: the kernel of the gated delta rule, which was
    measured and moves as much, takes as long within 20 %.
    """

    def moved(name: str, read: int, written: int) -> Any:
        return make.ElementWise(name, layers, read // parts, written // parts, _STREAMED)

    inner, shared, gate = mamba.inner, 2 * mamba.groups * mamba.state, moved("gate", 2 * mamba.inner, mamba.inner)
    window, states = mamba.kernel * mamba.convolved, inner * mamba.state
    held = states * mamba.state_element(_HALF) // _HALF  # as numbers of 16 bits
    # What a chunk adds to the state is written, passed from chunk to chunk, and read with its tokens, in float32.
    passed = 2 * 2 * states // _CHUNK
    scan = moved("scan", 2 * (inner + shared) + passed, inner + passed)
    decode = [moved("convolve", window, window), moved("update", held, held), gate]
    return decode, [moved("convolve", mamba.convolved, mamba.convolved), scan, gate]
