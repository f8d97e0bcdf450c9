"""The memory that an engine needs beside the cache, computed before anything is allocated.

Weights are exact; working memory is an estimate of the largest step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.config.executor import SIMULATED_WEIGHTS, W8A8
from kvlab.kv.spec import DTYPE_BYTES, SCALE_BYTES, KVSpec
from kvlab.models.config import DecoderConfig, TransformersConfig, WeightCounts
from kvlab.models.ops.base import PART_BYTES
from kvlab.models.sparse import SparseConfig
from kvlab.planning.formats import matrix_bytes
from kvlab.planning.startup import OTHERS, Startup, graph_bytes

_FLOAT32 = DTYPE_BYTES["float32"]
COMPACT_BYTES = 1.5  # of a number in 12 bits, apart from tables of exponents and exceptions
_STEP = 32  # inputs that are packed together in 12 bits
_PANEL = 16  # outputs, at most, to a multiple of which the native kernels pad a packed weight
_TILE = 2**20  # of random numbers, while dummy weights are made
_SMALL = 64 * 2**20  # metadata of steps, sequences, what an allocator keeps
_LIBRARIES, _COLLECTIVES = 128 * 2**20, 432 * 2**20  # of each simulated device
_BLOCK_BY_BLOCK = ("safe_softmax", "online_softmax")  # backends that copy one block at a time


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What decides the memory of an engine, apart from its model and its cache."""

    dtype: str
    device: str  # "cpu" or "cuda"
    attention: str  # name of the backend
    native: bool  # whether kvlab's CPU kernels compute what is not attention
    onednn: bool  # whether PyTorch computes it in bfloat16, on a CPU with products of it: oneDNN packs the weights
    weights: str  # as executor.weights; fp8, nvfp4, int4_wo: of all but the output layer
    max_batched_tokens: int
    max_batch_size: int
    max_seq_len: int
    block_size: int  # of the pool
    random_sampling: bool = True  # whether tokens are sampled, rather than greedy
    speculated: int = 0  # most tokens proposed for a sequence in a step
    devices: int | None = None  # that are simulated, with a framework's kernels; None: this machine's device
    startup: Startup = OTHERS  # what a simulated framework counts at its start
    ranks: int = 1  # processes of this machine that share the heads, the columns and the vocabulary

    @property
    def element(self) -> int:
        """Bytes of a number."""
        return DTYPE_BYTES[self.dtype]

    @property
    def matrix_dtype(self) -> str:
        """What the matrices of the layers are stored in."""
        return self.weights if self.weights in SIMULATED_WEIGHTS else self.output_dtype

    @property
    def output_dtype(self) -> str:
        """What the output layer is stored in: checkpoints in fp8 and in 4 bits leave it as it is."""
        return "int8" if self.weights in ("int8", W8A8) else self.dtype

    @property
    def rows(self) -> int:
        """The most rows of logits in a step."""
        return min(self.max_batch_size * (1 + self.speculated), self.max_batched_tokens)

    @property
    def is_packed(self) -> bool:
        """Whether matrices are kept in an order of their own, by kvlab's kernels or by oneDNN."""
        return self.native or self.onednn

    @property
    def is_widened(self) -> bool:
        """Whether PyTorch multiplies in float32, since it has no product for bfloat16."""
        return self.device == "cpu" and self.dtype == "bfloat16" and not (self.native or self.onednn)


class Matrix(NamedTuple):
    """Weights `[outputs, inputs]` of a product that occurs `times` times."""

    times: int
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of a model as it is loaded."""

    matrices: int  # the output layer's included, which a tied embedding may be, too
    output: int  # the output layer's part of `matrices`
    embedding: int  # a table of its own beside the output layer; 0: one copy is both
    norms: int
    biases: int
    scales: int  # of quantised weights
    rotary: int  # tables of angles; computed, not loaded
    stored: int  # numbers, not bytes: weights, as often as they are held

    @property
    def body(self) -> int:
        """Bytes that every token reads: all but the output layer and the embedding."""
        return self.matrices - self.output + self.norms + self.biases + self.scales

    @property
    def parameters(self) -> int:
        """Bytes of what is loaded."""
        return self.matrices + self.embedding + self.norms + self.biases + self.scales

    @property
    def total(self) -> int:
        """Bytes in memory."""
        return self.parameters + self.rotary


def weight_bytes(model: DecoderConfig, settings: EngineSettings) -> WeightBytes:
    """What the model takes once it is loaded."""
    if isinstance(model, TransformersConfig):
        return _weight_bytes_in_transformers(model.counts, model.vocab_size, settings)
    element, hidden = settings.element, model.hidden_size
    vocabulary = model.vocab_size * hidden
    *layer, output = matrices(model)
    stored = [(matrix, settings.matrix_dtype) for matrix in layer] + [(output, settings.output_dtype)]
    # A tied embedding that oneDNN has packed cannot serve as a table.
    own_table = not model.tie_word_embeddings or (settings.is_packed and not settings.native)
    head = 2 * model.head_dim if model.qk_norm else 0
    norms = model.num_layers * ((4 if model.sandwich_norms else 2) * hidden + head) + hidden
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    biases = (q + 2 * kv if model.qkv_bias else 0) + (hidden if model.output_bias else 0)
    ropes = len({layer.rope for layer in model.layers})
    # Serving frameworks have angles for all positions that the model knows, and a table on each device.
    positions = settings.max_seq_len
    if settings.devices:
        positions = max(positions, model.max_position_embeddings) * settings.devices
    return WeightBytes(
        matrices=sum(matrix.times * _matrix_bytes(matrix, dtype, settings) for matrix, dtype in stored),
        output=_matrix_bytes(output, settings.output_dtype, settings),
        embedding=vocabulary * element if own_table else 0,
        norms=norms * (_FLOAT32 if model.norm_offset else element),
        biases=model.num_layers * biases * element,
        scales=sum(
            matrix.times * matrix_bytes(matrix.outputs, matrix.inputs, dtype)[1] for matrix, dtype in stored
        ),
        rotary=(1 if settings.devices else 2) * ropes * positions * model.head_dim * element,
        stored=sum(matrix.times * matrix.outputs * matrix.inputs for matrix, _ in stored)
        + (vocabulary if own_table else 0)
        + norms
        + model.num_layers * biases,
    )


def _weight_bytes_in_transformers(counts: WeightCounts, vocab_size: int, settings: EngineSettings) -> WeightBytes:
    element, dtypes = settings.element, (settings.matrix_dtype, settings.output_dtype)
    rows = zip((counts.rows, vocab_size), dtypes, strict=True)
    output = counts.output * DTYPE_BYTES[settings.output_dtype]
    # As one row, which counts groups of numbers that share a scale; a row's own scale is that of each of its rows.
    body, scales = matrix_bytes(1, counts.body, settings.matrix_dtype)
    if settings.matrix_dtype in DTYPE_BYTES:
        scales = SCALE_BYTES * sum(count for count, dtype in rows if dtype != settings.dtype)
    return WeightBytes(
        matrices=body + output,
        output=output,
        embedding=counts.embedding * element,
        norms=counts.norms * element,
        biases=counts.biases * element,
        scales=scales,
        rotary=0,
        stored=counts.total,
    )


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """Bytes that come and go. A step needs the largest of `layers` + `attention`, `logits` and `compiling`; weights
    are loaded before there is a cache.
    """

    layers: int  # activations of a layer, for all tokens of a step
    attention: int  # a backend's copies of K and V, and its scores
    logits: int  # of the rows that are sampled, what sampling makes of them, and what is kept beside them
    loading: int  # what weights need for a moment, beyond what they take in the end
    small: int
    compiling: int = 0  # example inputs on which a simulated framework times its kernels
    graphs: int = 0  # kept free for CUDA graphs
    counts: int = 0  # of each sequence's tokens, which a simulated framework keeps for penalties

    @property
    def peak(self) -> int:
        """Of a step."""
        kept = self.small + self.graphs + self.counts
        return max(self.layers + self.attention, self.logits, self.compiling) + kept

    @property
    def is_of_logits(self) -> bool:
        """Whether the logits are what a step needs most for."""
        return self.logits > self.layers + self.attention and self.logits >= self.compiling


def working_memory(model: DecoderConfig, cache: KVSpec, settings: EngineSettings) -> WorkingMemory:
    """What the largest step and the loading of the weights need."""
    element, tokens = settings.element, settings.max_batched_tokens
    count = layer_tensors(model, settings)
    heads = (count.queries * model.num_heads + count.keys * model.num_kv_heads) * model.head_dim
    divided = max(count.wide * model.intermediate_size, heads) // (settings.devices or 1)
    if isinstance(model, SparseConfig):
        divided = model.layer_numbers(count.queries, count.keys)
    per_token = count.stream * model.hidden_size + divided
    # Where PyTorch multiplies in float32, a product's rows and a part of its weight are there in float32, too.
    widened = settings.is_widened and not isinstance(model, TransformersConfig)
    row, part = (model.hidden_size * _FLOAT32, PART_BYTES) if widened else (0, 0)
    own = not settings.devices and not isinstance(model, TransformersConfig)  # kvlab's decoder
    # Greedy decoding takes the largest of each row, of float32 logits. Sampling copies them, takes their softmax,
    # and sums that in float64; or, with top-k, sorts them. A GPU sorts values and indices into a second copy.
    logit = _FLOAT32 if own else element
    per_logit = logit + (7 * _FLOAT32 if settings.random_sampling else 0)
    scratch = 0
    if settings.devices:
        per_logit = settings.startup.logit_bytes
        scratch = min(settings.rows, settings.startup.scratch_rows) * model.vocab_size * _FLOAT32
    if model.logit_soft_cap is not None or isinstance(model, TransformersConfig):  # which may scale or cap them
        per_logit = max(per_logit, 3 * logit)
    if isinstance(model, TransformersConfig):
        loaded = model.counts.largest
    else:
        # The parts of a product are joined, then packed; an output layer of its own comes last.
        *layer, output = (matrix.outputs * matrix.inputs for matrix in matrices(model))
        loaded = max(2 * max(layer), output) if settings.is_packed else max(layer)
    stored = settings.matrix_dtype if settings.weights in SIMULATED_WEIGHTS else settings.dtype
    loaded, _ = matrix_bytes(1, loaded, stored)
    # kvlab's decoder has the residual stream in float32, beside the embeddings it began with.
    stream = model.hidden_size * _FLOAT32 if own and element < _FLOAT32 else 0
    layers = tokens * (element * per_token + row + stream) + part
    # Native layers keep their memory from step to step.
    beside_logits = layers if settings.native else tokens * (2 * model.hidden_size * element + stream)
    # Metadata and what libraries keep. vLLM calls it non-torch memory: 0.13 GiB of a GPU, and 0.55 GiB of each of
    # two, whose collectives have buffers.
    small = _SMALL if settings.devices is None else _LIBRARIES + (_COLLECTIVES if settings.devices > 1 else 0)
    return WorkingMemory(
        layers=layers,
        attention=_attention(model, cache, settings),
        logits=beside_logits + settings.rows * (model.vocab_size * per_logit + row) + part + scratch,
        loading=loaded + _TILE * (_FLOAT32 + element),
        small=small,
        **_startup(model, settings),
    )


def _startup(model: DecoderConfig, settings: EngineSettings) -> dict[str, int]:
    """What a simulated framework's start adds."""
    devices, start, row = settings.devices, settings.startup, model.hidden_size * settings.element
    if not devices:
        return {}
    table = model.vocab_size * row // devices + model.max_position_embeddings * model.head_dim * settings.element
    return {
        "compiling": table + settings.max_batched_tokens * 2 * row if start.compiles else 0,
        "graphs": graph_bytes(settings.max_batch_size, settings.max_batched_tokens, row) if start.graphs else 0,
        "counts": settings.max_batch_size * model.vocab_size * 33 // 8 if start.counts else 0,  # int32, and a bit
    }


class LayerTensors(NamedTuple):
    """How many tensors a layer holds for a token at its peak: `stream` of `hidden` numbers, and either `wide` of
    `intermediate` numbers or `queries` of all query heads and `keys` of all KV heads, whichever is more.
    """

    stream: int
    wide: int
    queries: int
    keys: int


IN_PLACE = LayerTensors(stream=4, wide=3, queries=3, keys=2)  # kvlab's kernels, and those of serving frameworks
NEW_TENSORS = LayerTensors(stream=5, wide=4, queries=6, keys=4)  # PyTorch
TRANSFORMERS = LayerTensors(stream=8, wide=4, queries=6, keys=4)  # whose norms make copies in float32


def layer_tensors(model: DecoderConfig, settings: EngineSettings) -> LayerTensors:
    """What computes the model holds at its peak."""
    if isinstance(model, TransformersConfig):
        return TRANSFORMERS
    return IN_PLACE if settings.native or settings.devices else NEW_TENSORS


def _attention(model: DecoderConfig, cache: KVSpec, settings: EngineSettings) -> int:
    """A backend's `working_bytes`. By default a kernel reads blocks in place, and any other copies the K and V of
    a sequence to float32 and writes its scores down.
    """
    known = settings.attention in ATTENTION_BACKENDS.names()
    backend = ATTENTION_BACKENDS.get(settings.attention) if known else None
    if backend is not None and backend.working_bytes is not None:
        return int(backend.working_bytes(model, settings))
    if backend is not None and backend.is_kernel:
        return 0
    tokens, longest, size = settings.max_batched_tokens, settings.max_seq_len, settings.block_size
    per_token = 2 * model.num_kv_heads * model.head_dim  # K and V
    if settings.attention == "sdpa":
        # Buffers that grow to twice a sequence; a dtype of its own once more as float32 and in the model's; a mask.
        buffers = 2 * longest * model.num_kv_heads * sum(cache.row_bytes)
        converted = set(cache.dtypes) != {settings.dtype}
        widened = per_token * longest * (_FLOAT32 + settings.element) if converted else 0
        return buffers + widened + tokens * longest * (1 + _FLOAT32)
    if settings.attention in _BLOCK_BY_BLOCK:
        return _FLOAT32 * (2 * size * per_token + 4 * model.num_heads * tokens * (size + model.head_dim))
    scores = 4 * model.num_heads * tokens * longest * _FLOAT32
    return per_token * longest * (settings.element + 2 * _FLOAT32) + scores


def matrices(model: DecoderConfig) -> Iterator[Matrix]:
    """Every product of a model, as the decoder joins them; the output layer last."""
    hidden, wide, layers = model.hidden_size, model.intermediate_size, model.num_layers
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    yield Matrix(layers, q + 2 * kv, hidden)
    yield Matrix(layers, hidden, q)
    yield Matrix(layers, 2 * wide, hidden)
    yield Matrix(layers, hidden, wide)
    yield Matrix(1, model.vocab_size, hidden)


def _matrix_bytes(matrix: Matrix, dtype: str, settings: EngineSettings) -> int:
    if not settings.native:
        return matrix_bytes(matrix.outputs, matrix.inputs, dtype)[0]
    together = 4 if settings.weights == W8A8 else 2
    outputs, inputs = -(-matrix.outputs // _PANEL) * _PANEL, -(-matrix.inputs // together) * together
    if settings.weights == "compact" and inputs % _STEP == 0:  # compact_weight.hpp states the layout
        steps = inputs // _STEP
        exponents, exceptions = 16, 8 * (5 + steps // 4)
        return outputs // _PANEL * (steps * _STEP * _PANEL * 3 // 2 + exponents + exceptions)
    return outputs * inputs * DTYPE_BYTES[dtype]
