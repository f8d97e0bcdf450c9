"""The planner's figures for people: what there is, what takes it, and a table of sequences."""

from collections import Counter
from collections.abc import Iterator

from rich.table import Column, Table

from kvlab.config import format_bytes
from kvlab.kv.pools import unit_of
from kvlab.kv.spec import DTYPE_BYTES, SCALE_BYTES, KVSpec
from kvlab.lab.capacity import CapacityPlan
from kvlab.lab.results.tables import new_table
from kvlab.lab.terminal import Terminal, marked
from kvlab.models.sparse import SparseConfig, is_mixture
from kvlab.planning.formats import DESCRIBED
from kvlab.planning.memory import layer_tensors


def show_plan(plan: CapacityPlan, console: Terminal) -> None:
    """Print the figures."""
    console.print(marked("[bold]{}[/]: ", plan.name), f"{model_line(plan)}\n", sep="")
    lines = Table("", Column(justify="right"), "", box=None, show_header=False, pad_edge=False)
    for line in capacity_lines(plan):
        lines.add_row(*line)
    console.print(lines)
    console.print()
    console.print(capacity_table(plan))
    for note in closing_notes(plan):
        console.print(note, style="dim")


def capacity_lines(plan: CapacityPlan) -> Iterator[tuple[str, str, str]]:
    """Name, size, and the formula with every input."""
    model, spec, size, longest = plan.model, plan.spec, plan.paged.block_size, plan.settings.max_seq_len
    keys, values = (_head(spec, side) for side in (0, 1))
    factor, head = ("2 (K and V) x ", keys) if keys == values else ("", f"(K {keys} + V {values})")
    heads = f"{spec.num_kv_heads} KV head{'s' if spec.num_kv_heads > 1 else ''}"
    formula = f"{factor}{spec.num_layers} layers x {heads} x {head}, {' and '.join(dict.fromkeys(spec.dtypes))}"
    if spec.value_dim == 0:
        formula = f"{spec.num_layers} layers x a latent of {keys}, {spec.dtype}"
    if spec.copies > 1:
        formula += f"; {spec.copies} devices have copies"
    yield "a token", f"{spec.bytes_per_token:,} bytes", formula
    yield "a block", f"{size * plan.paged.bytes_per_slot:,} bytes", _block_formula(plan)
    positions = f"model.max_seq_len; the model has positions up to {model.max_position_embeddings:,}"
    if model.has_states:
        yield "a sequence", "", f"up to {longest:,} tokens ({positions})"
    else:
        yield "a slot", f"{longest * spec.bytes_per_token:,} bytes", f"{longest:,} tokens ({positions})"
    windows = Counter(layer.sliding_window for layer in model.layers if layer.sliding_window is not None)
    for window, layers in windows.items():
        keep = "keep no others" if plan.paged.groups else "keep all others too: kv.windows=false"
        if window >= longest:
            keep = f"all of them, up to model.max_seq_len={longest:,}"
        note = f"see the last {window:,} tokens, and {keep}"
        yield "sliding windows", f"{layers} of {model.num_layers} layers", note
    if isinstance(model, SparseConfig) and (states := model.states) is not None:
        state = states.state_bytes(1, DTYPE_BYTES[plan.settings.dtype])
        note = f"keep a state of {format_bytes(state)} each for a sequence, in one block of its group, not K and V"
        note += ", which contiguous slots have no room for"
        yield states.called, f"{model.state_layers} of {model.num_layers} layers", note
    yield "", "", ""
    if plan.memory is not None:
        of_devices = f": {plan.of_devices}" if plan.of_devices else ""
        yield "memory", format_bytes(plan.memory), f"on {plan.device}{of_devices}"
    yield "weights", format_bytes(plan.weights.total), _weights_formula(plan)
    yield "working memory", format_bytes(plan.working.peak), _working_formula(plan)
    yield "KV cache", format_bytes(plan.paged.num_bytes), _pools_formula(plan)
    if (ranks := plan.settings.ranks) > 1:
        parts = plan.weights.total, plan.working.peak, plan.paged.num_bytes
        each = (format_bytes(part // ranks) for part in parts)
        yield "ranks", str(ranks), "each with {} of weights, {} of working memory, {} of KV cache".format(*each)


def model_line(plan: CapacityPlan) -> str:
    """The model's shape in words."""
    model, millions = plan.model, plan.model.num_parameters / 1e6
    heads = f"{model.num_heads} query heads over {model.num_kv_heads} KV heads of {model.head_dim}"
    if not isinstance(model, SparseConfig) or not is_mixture(model):
        return f"{model.num_layers} layers, {heads}, {millions:,.0f} M parameters"
    if model.latent is not None:
        heads = f"{model.num_heads} query heads over a latent of {plan.spec.head_dim}"
    experts, active = model.experts, (model.active_parameters + model.vocab_size * model.hidden_size) / 1e6
    chosen = f"{experts.active} of {experts.count} experts" + (" and shared ones" if experts.shared else "")
    return f"{model.num_layers} layers, {heads}, {chosen}, {millions:,.0f} M parameters, {active:,.0f} M active"


def _block_formula(plan: CapacityPlan) -> str:
    pool, spec = plan.paged, plan.spec
    if not pool.groups:
        return f"{pool.block_size} tokens x {spec.bytes_per_token:,} bytes"
    kinds = Counter(
        "states" if group.has_state else "full attention" if group.window is None else f"{group.window:,} tokens"
        for group in pool.groups
    )
    groups = " and ".join(f"{count} of {kind}" for kind, count in kinds.items())
    return f"{pool.block_size} tokens x {spec.layers_per_block} layers; groups of layers: {groups}"


def _head(spec: KVSpec, side: int) -> str:
    """Bytes of K (0) or V (1) of a head of a token."""
    dtype, numbers = spec.dtypes[side], f"{spec.head_dim} numbers x"
    if dtype == "int4":
        return f"({numbers} 1/2 byte + {spec.row_bytes[side] - spec.head_dim // 2} of their scales)"
    if spec.is_scaled[side]:
        return f"({numbers} 1 byte + {SCALE_BYTES} of their scale)"
    size = DTYPE_BYTES[dtype]
    return f"{numbers} {size} byte{'s' if size > 1 else ''}"


def _weights_formula(plan: CapacityPlan) -> str:
    weights, settings, model = plan.weights, plan.settings, plan.model
    head = weights.output if settings.output_dtype != settings.matrix_dtype else 0
    stored = settings.matrix_dtype
    if isinstance(model, SparseConfig):
        stored = model.stored(settings.weights, settings.dtype)
    text = f"{model.num_parameters:,} parameters, matrices in {stored} "
    text += "".join(f"({says}) " for name, says in DESCRIBED.items() if name in stored.split(" and "))
    text += format_bytes(weights.matrices - head)
    text += f", output layer in {settings.output_dtype} {format_bytes(head)}" if head else ""
    if model.tie_word_embeddings:
        text += ", embedding held twice" if weights.embedding else ", embedding tied"
    for name, size in {
        "embedding": weights.embedding,
        "scales": weights.scales,
        "norms and biases": weights.norms + weights.biases,
        "rotary tables": weights.rotary,
    }.items():
        text += f", {name} {format_bytes(size)}" if size or name not in ("embedding", "scales") else ""
    return text


def _working_formula(plan: CapacityPlan) -> str:
    """Of the step that needs most."""
    working, settings, model = plan.working, plan.settings, plan.model
    small = f", {format_bytes(working.graphs)} for CUDA graphs" if working.graphs else ""
    small += f", {format_bytes(working.counts)} to count tokens for penalties" if working.counts else ""
    small += f", and {format_bytes(working.small)} for small things"
    small += "" if settings.startup.profiled else "; in what is left free"
    if working.compiling > max(working.logits, working.layers + working.attention):
        return f"largest: {format_bytes(working.compiling)} while kernels are compiled and timed{small}"
    if working.is_of_logits:
        stream = 2 * settings.max_batched_tokens * model.hidden_size * settings.element
        width = (working.logits - stream) // (settings.rows * model.vocab_size)
        logits = f"{settings.rows} rows x {model.vocab_size:,} logits x {width} bytes{settings.startup.otherwise}"
        return f"largest: {logits} + {format_bytes(stream)} of the step's tokens{small}"
    count = layer_tensors(model, settings)
    queries, keys = (heads * model.head_dim for heads in (model.num_heads, model.num_kv_heads))
    most = f"{count.wide} x {model.intermediate_size:,} intermediate"
    if count.queries * queries + count.keys * keys > count.wide * model.intermediate_size:
        most = f"{count.queries} x {queries:,} of query heads + {count.keys} x {keys:,} of KV heads"
    if isinstance(model, SparseConfig):
        most = f"{model.layer_numbers(count.queries, count.keys):,} of experts or heads on a device"
    else:
        most += f" / {settings.devices} devices" if (settings.devices or 1) > 1 else ""
    numbers = f"({count.stream} x {model.hidden_size:,} hidden + {most}) x {settings.element} bytes"
    if working.attention:
        small = f", {format_bytes(working.attention)} for attention={settings.attention}{small}"
    return f"largest: {settings.max_batched_tokens} tokens x {numbers}{small}"


def _pools_formula(plan: CapacityPlan) -> str:
    """The blocks that each backend makes of the cache."""
    texts = []
    for backend, pool in sorted(plan.pools.items(), key=lambda item: item[1] != plan.paged):
        unit, name = unit_of(backend), "" if pool == plan.paged else f"{backend}: "
        blocks = f"{pool.num_blocks:,} {unit}s, {pool.token_slots:,} token slots" if pool else f"not one {unit}"
        if plan.paged.groups and pool:  # whose slots are not of all layers
            blocks += f" of {plan.spec.layers_per_block if pool.groups else plan.spec.num_layers} layers"
        texts.append(name + blocks)
    return "; ".join(texts)


def capacity_table(plan: CapacityPlan) -> Table:
    """Sequences at each mean length."""
    backends = list(plan.pools)
    unused = (f"unused, {backend}" for backend in backends)
    compared = ["advantage"] * (len(backends) > 1)
    table = new_table("mean length", *backends, *compared, *unused, justify="right")
    for row in plan.lengths:
        table.add_row(
            f"{row.length:,}",
            *(f"{count:,}" for count in row.sequences.values()),
            *("-" if row.advantage is None else f"{row.advantage:.2f}x" for _ in compared),
            *(f"{100 * share:.1f} %" for share in row.unused.values()),
        )
    return table


def closing_notes(plan: CapacityPlan) -> Iterator[str]:
    """What the table does not say."""
    yield (
        "Sequences are counted at their full length, each with blocks of its own: those that share a prefix or are "
        "still short fit in greater numbers. Unused is what varying lengths leave of a slot, or of half a block."
    )
    batch = plan.max_batch_size
    if max(count for row in plan.lengths for count in row.sequences.values()) > batch:
        yield f"scheduler.max_batch_size={batch} lets {batch} run at once; more than that have to wait."
    yield from (f"warning: {text}" for text in plan.lacking)
    if plan.sure is not None:
        yield f"The size of the pool is planned: {plan.sure}."
    if plan.settings.device == "cpu":
        yield "The interpreter and its libraries take about 0.5 GiB of the machine's memory beside this."
