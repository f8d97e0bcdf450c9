"""What an engine takes of its device beside the cache: weights as they are loaded, and what its steps work with.

Nothing here is measured or allocated. Weights are exact; working memory is an estimate of the largest step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvlab.kv.spec import DTYPE_BYTES, SCALE_BYTES, KVSpec
from kvlab.models.config import DecoderConfig

_FLOAT32 = DTYPE_BYTES["float32"]
_PANEL = 16  # outputs, at most, to a multiple of which the native kernels pad a packed weight
_TILE = 2**20  # of random numbers, while dummy weights are made
_SMALL = 64 * 2**20  # metadata of steps, sequences, what an allocator keeps
_PYTORCH_ATTENTION = ("concat", "safe_softmax", "online_softmax", "sdpa")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What decides the memory of an engine, apart from its model and its cache."""

    dtype: str
    device: str  # "cpu" or "cuda"
    attention: str  # name of the backend
    native: bool  # whether kvlab's CPU kernels compute what is not attention
    int8_weights: bool
    max_batched_tokens: int
    max_batch_size: int
    max_seq_len: int
    block_size: int  # of the pool
    by_chance: bool = True  # whether tokens are sampled, rather than greedy

    @property
    def element(self) -> int:
        """Bytes of a number."""
        return DTYPE_BYTES[self.dtype]

    @property
    def rows(self) -> int:
        """The most rows of logits in a step."""
        return min(self.max_batch_size, self.max_batched_tokens)

    @property
    def is_packed(self) -> bool:
        """Whether matrices are kept in an order of their own, by kvlab's kernels or by oneDNN."""
        return self.device == "cpu" and self.dtype == "bfloat16"


class Matrix(NamedTuple):
    """Weights `[outputs, inputs]` of a product that occurs `times` times."""

    times: int
    outputs: int
    inputs: int

    @property
    def numbers(self) -> int:
        """Of one."""
        return self.outputs * self.inputs


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of a model as it is loaded."""

    matrices: int  # the output layer's included, which a tied embedding may be, too
    embedding: int  # a table of its own beside the output layer; 0: one copy is both
    norms: int
    biases: int
    scales: int  # of int8
    rotary: int  # tables of angles; computed, not loaded
    stored: int  # numbers, not bytes: weights, as often as they are held

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
    element, hidden = settings.element, model.hidden_size
    vocabulary = model.vocab_size * hidden
    products = list(matrices(model))
    outputs = sum(matrix.times * matrix.outputs for matrix in products)
    # oneDNN's order of a tied embedding cannot be looked up in.
    own_table = not model.tie_word_embeddings or (settings.is_packed and not settings.native)
    head = 2 * model.head_dim if model.qk_norm else 0
    norms = model.num_layers * ((4 if model.sandwich_norms else 2) * hidden + head) + hidden
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    biases = (q + 2 * kv if model.qkv_bias else 0) + (hidden if model.output_bias else 0)
    ropes = len({layer.rope for layer in model.layers})
    numbers = sum(matrix.times * matrix.numbers for matrix in products)
    return WeightBytes(
        matrices=sum(matrix.times * _matrix_bytes(matrix, settings) for matrix in products),
        embedding=vocabulary * element if own_table else 0,
        norms=norms * (_FLOAT32 if model.norm_offset else element),
        biases=model.num_layers * biases * element,
        scales=outputs * SCALE_BYTES if settings.int8_weights else 0,
        rotary=2 * ropes * settings.max_seq_len * model.head_dim * element,
        stored=numbers + (vocabulary if own_table else 0) + norms + model.num_layers * biases,
    )


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """Bytes that come and go. Steps need the larger of `layers` and `logits`; loading happens before there is a
    cache.
    """

    layers: int  # activations of a layer, for all tokens of a step
    attention: int  # what a backend puts K, V and scores into
    logits: int  # of the rows that are sampled, and what sampling makes of them
    loading: int  # what weights need for a moment, beyond what they take in the end
    small: int = _SMALL

    @property
    def peak(self) -> int:
        """Of a step."""
        return max(self.layers + self.attention, self.logits) + self.small


def working_memory(model: DecoderConfig, cache: KVSpec, settings: EngineSettings) -> WorkingMemory:
    """What the largest step and the loading of the weights need.

    Of a layer, whichever is more: attention or feed-forward; each beside the residual stream, what is to be added
    to it, and that normed. kvlab's kernels work in place where PyTorch makes new tensors.
    """
    element, tokens = settings.element, settings.max_batched_tokens
    per_token = element * _activations(model, native=settings.native)
    # Greedy takes the largest of each row. By chance: a copy in float32, its softmax, and that summed in float64;
    # or, where only the most likely tokens are kept, those sorted.
    per_logit = element + (7 * _FLOAT32 if settings.by_chance else 0)
    if model.logit_soft_cap is not None:
        per_logit = max(per_logit, 3 * element)
    return WorkingMemory(
        layers=tokens * per_token,
        attention=_attention(model, cache, settings),
        logits=2 * tokens * model.hidden_size * element + settings.rows * model.vocab_size * per_logit,
        loading=_loading(model, settings),
    )


class LayerTensors(NamedTuple):
    """How many tensors a layer holds for a token at its peak: `stream` of `hidden` numbers, and either `wide` of
    `intermediate` numbers or `queries` of all query heads and `keys` of all KV heads, whichever is more.
    """

    stream: int
    wide: int
    queries: int
    keys: int


IN_PLACE = LayerTensors(stream=4, wide=3, queries=3, keys=2)  # kvlab's kernels
NEW_TENSORS = LayerTensors(stream=5, wide=4, queries=6, keys=4)  # PyTorch


def _activations(model: DecoderConfig, *, native: bool) -> int:
    """Numbers that a layer holds for a token at its peak."""
    count = IN_PLACE if native else NEW_TENSORS
    heads = (count.queries * model.num_heads + count.keys * model.num_kv_heads) * model.head_dim
    return count.stream * model.hidden_size + max(count.wide * model.intermediate_size, heads)


def _attention(model: DecoderConfig, cache: KVSpec, settings: EngineSettings) -> int:
    """Kernels read pages where they are. PyTorch's backends copy a sequence, or write scores down."""
    if settings.attention not in _PYTORCH_ATTENTION:
        return 0
    tokens, longest = settings.max_batched_tokens, settings.max_seq_len
    heads, sequence = model.num_heads, 2 * longest * model.num_kv_heads * model.head_dim  # K and V
    if settings.attention == "sdpa":
        # Buffers that grow to twice a sequence; int8 once more as float32 and in the model's dtype; a mask.
        buffers = 2 * sequence * DTYPE_BYTES[cache.dtype]
        widened = sequence * (_FLOAT32 + settings.element) if cache.is_scaled else 0
        return buffers + widened + tokens * longest * (1 + _FLOAT32)
    if settings.attention == "concat":
        return sequence * (settings.element + 2 * _FLOAT32) + 4 * heads * tokens * longest * _FLOAT32
    block = 2 * settings.block_size * model.num_kv_heads * model.head_dim * 2 * _FLOAT32
    return block + _FLOAT32 * heads * tokens * (4 * settings.block_size + 4 * model.head_dim)


def _loading(model: DecoderConfig, settings: EngineSettings) -> int:
    """A product's parts, joined, and packed from that; an output layer of its own comes last."""
    copies = 2 if settings.is_packed else 1
    *layer, output = matrices(model)
    largest = max(matrix.numbers for matrix in layer)
    vocabulary = output.numbers if settings.is_packed else 0
    return max(copies * largest, vocabulary) * settings.element + _TILE * (_FLOAT32 + settings.element)


def matrices(model: DecoderConfig) -> Iterator[Matrix]:
    """Every product of a model, as the decoder joins them; the output layer last."""
    hidden, wide, layers = model.hidden_size, model.intermediate_size, model.num_layers
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    yield Matrix(layers, q + 2 * kv, hidden)
    yield Matrix(layers, hidden, q)
    yield Matrix(layers, 2 * wide, hidden)
    yield Matrix(layers, hidden, wide)
    yield Matrix(1, model.vocab_size, hidden)


def _matrix_bytes(matrix: Matrix, settings: EngineSettings) -> int:
    if not (settings.is_packed and settings.native):
        return matrix.numbers * settings.element
    outputs, inputs = -(-matrix.outputs // _PANEL) * _PANEL, -(-matrix.inputs // 2) * 2
    return outputs * inputs * DTYPE_BYTES["int8" if settings.int8_weights else settings.dtype]
