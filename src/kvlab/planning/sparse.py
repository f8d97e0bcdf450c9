"""Weights of mixtures of experts on simulated devices, by what each part is stored in and how often it is held.

Experts are held once. What computes all tokens is held once by each group of devices that share the sequences; what
a group cannot divide (routers, the down projections of latent attention, a KV head of more devices than there are
heads, norms) by each device.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kvlab.kv.spec import DTYPE_BYTES
from kvlab.models.sparse import SparseConfig
from kvlab.planning.formats import matrix_bytes
from kvlab.planning.memory import EngineSettings, WeightBytes

_FLOAT32 = DTYPE_BYTES["float32"]


class Part(NamedTuple):
    """Weights `[outputs, inputs]` that occur `times` times on all devices together."""

    times: int
    outputs: int
    inputs: int
    stored: str

    @property
    def numbers(self) -> int:
        """Of all of them."""
        return self.times * self.outputs * self.inputs

    @property
    def bytes(self) -> tuple[int, int]:
        """Of the numbers, and of their scales."""
        numbers, scales = matrix_bytes(self.outputs, self.inputs, self.stored)
        return self.times * numbers, self.times * scales


def _body(model: SparseConfig, settings: EngineSettings) -> Iterator[Part]:
    """All matrices but the experts' and the output layer's."""
    division, mixture, hidden = model.division, model.experts, model.hidden_size
    formats = model.formats(settings.weights, settings.dtype)
    matrices = model.attention_matrices
    for number, (outputs, inputs, is_whole) in enumerate(matrices):
        copies = division.devices if is_whole else division.data
        if model.latent is None and number == 1:  # K and V
            copies *= model.kv_copies
        stored = formats.output if number == len(matrices) - 1 else formats.attention
        yield Part(model.attention_layers * copies, outputs, inputs, stored)
    if (states := model.states) is not None:
        for outputs, inputs, part in states.matrices(hidden):
            stored = formats._asdict().get(part, settings.dtype)
            yield Part(model.state_layers * division.data, outputs, inputs, stored)
        yield Part(model.state_layers * division.data, states.vectors, 1, settings.dtype)
    for layers, size in ((model.dense_layers, model.intermediate_size), (mixture.layers, mixture.shared)):
        if layers and size:
            yield Part(layers * division.data, mixture.inner * size, hidden, formats.dense)
            yield Part(layers * division.data, hidden, size, formats.dense)
    if mixture.width:  # to it and back, which are whole on each device
        yield Part(2 * mixture.layers * division.devices, mixture.width, hidden, settings.dtype)
    yield Part(mixture.layers * division.devices, mixture.count, hidden, settings.dtype)  # routers


def _experts(model: SparseConfig, settings: EngineSettings) -> Iterator[Part]:
    mixture, width = model.experts, model.expert_width
    stored = model.formats(settings.weights, settings.dtype).experts
    yield Part(mixture.layers * mixture.count, mixture.inner * mixture.size, width, stored)
    yield Part(mixture.layers * mixture.count, width, mixture.size, stored)


def expert_bytes(model: SparseConfig, settings: EngineSettings) -> int:
    """Of all experts that are chosen among, their scales and biases included."""
    mixture = model.experts
    biases = mixture.layers * mixture.count * (2 * mixture.size + model.hidden_size) * settings.element
    return sum(sum(part.bytes) for part in _experts(model, settings)) + biases * mixture.has_biases


def sparse_weight_bytes(model: SparseConfig, settings: EngineSettings) -> WeightBytes:
    """What the model takes on all its devices once it is loaded."""
    division, mixture, element = model.division, model.experts, settings.element
    head = Part(division.data, model.vocab_size, model.hidden_size, settings.output_dtype)
    parts = [*_body(model, settings), *_experts(model, settings), head]
    numbers, scales = (sum(part.bytes[side] for part in parts) for side in (0, 1))
    table = 0 if model.tie_word_embeddings else division.data * model.vocab_size * model.hidden_size
    norms, corrections = division.devices * model.norm_numbers, mixture.layers * mixture.count
    biases = division.devices * model.bias_numbers
    if mixture.has_biases:
        biases += corrections * (2 * mixture.size + model.hidden_size + division.devices)
    corrections *= division.devices * mixture.has_correction
    positions = max(settings.max_seq_len, model.max_position_embeddings)
    return WeightBytes(
        matrices=numbers,
        output=head.bytes[0],
        embedding=table * element,
        norms=norms * element + corrections * _FLOAT32,
        biases=biases * element,
        scales=scales,
        rotary=division.devices * positions * model.rotary_dim * element,
        stored=sum(part.numbers for part in parts) + table + norms + corrections + biases,
    )
