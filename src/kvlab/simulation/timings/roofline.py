"""A step's time from a model's shapes and a device's rates (roofline: Williams, Waterman, Patterson, 2009).

A step over T tokens of B sequences on N devices, each of which has 1/N of every matrix and of every head:

    linear      max(bytes of the weights / bandwidth, 2 x weights x T / arithmetic)
                a mixture of E experts, k to a token, reads E (1 - (1 - k / E)^T) of them, and has the weights of k
                the output layer's rows are those that are sampled; weights in fp8 and nvfp4 are multiplied in fp8
                and fp4 where the device has arithmetic for it, else as the activations are (Marlin's kernels), and
                so are weights in int4_wo and the output layer
    attention   max(bytes of K and V read or written / bandwidth, 4 x heads x head_dim x pairs / arithmetic), where
                a pair is a query and a token it attends to; over latents of rank r, with p numbers of positions,
                2 x heads x (2 r + p) operations in decode, and in prefill those of the heads that are made of them
    links       an all-reduce behind attention or a state, and one behind a feed-forward: 2 (N - 1) / N x T x hidden
                numbers over the links, and their latency; N / 2 times that where the links meet in the host; with
                groups that share the sequences the first is within a group, and the other is what hands all tokens
                to the experts of all, and back
    launches    `LAUNCHES` kernels for attention or a state, and for a feed-forward

Rates are the data sheet's times an efficiency. Each sequence counts with its length, each layer with its window.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlab.config import FrameworkConfig, HardwareConfig
from kvlab.core import attended_pairs
from kvlab.errors import ConfigError
from kvlab.kv.spec import DTYPE_BYTES
from kvlab.models.config import DecoderConfig
from kvlab.models.sparse import SparseConfig
from kvlab.simulation.timings import TIMINGS
from kvlab.simulation.timings.base import LINKS, Counts, Deployment, StepTiming, set_kernels, set_rates

Rates = NDArray[np.float64]
Number = TypeVar("Number", float, Rates)
_MULTIPLIED = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}  # formats of weights, by arithmetic of their own
LAUNCHES = 4  # in the mean: two norms, QKV, rotation and cache write, attention, output, gate and up, down


class StepTime(NamedTuple):
    """Seconds of a step, by what takes them."""

    linear: float
    attention: float
    links: float
    launches: float

    @property
    def total(self) -> float:
        """All of them, one after the other."""
        return sum(self)


@TIMINGS.register("roofline")
@dataclass(frozen=True)
class RooflineTiming(StepTiming):
    """Times steps of a model on `devices` devices of a kind. `dtype` is that of the products."""

    model: DecoderConfig
    hardware: HardwareConfig
    devices: int
    dtype: str
    body_bytes: float  # of the weights that every token reads
    head_bytes: float  # of the output layer
    kv_bytes_per_token: int  # of all layers and devices
    body_dtype: str | None = None  # of the products with the weights, all but the output layer's; None: `dtype`
    expert_bytes: float = 0.0  # of the body's, those of the experts that are chosen among
    expert_dtype: str | None = None  # of the products with these; None: as the body's
    because: str | None = None

    description = "roofline"
    source = "what bandwidth and arithmetic give"

    def unread(self, hardware: HardwareConfig, framework: FrameworkConfig) -> list[str]:
        links = set_rates(hardware, LINKS) if self.devices == 1 else []
        alone = [
            f"{setting} has no effect here: it is read by executor.tensor_parallel of 2 or more"
            for setting in links
        ]
        return self._unread(set_kernels(framework), "silicon") + alone

    @classmethod
    def of(cls, deployment: Deployment) -> RooflineTiming:
        hardware, executor = deployment.hardware, deployment.config.executor
        if not hardware.bandwidth_gb_s:
            text = f"timing=roofline needs the bandwidth of the memory of {hardware.name}"
            raise ConfigError("hardware.bandwidth_gb_s", hardware.bandwidth_gb_s, text)
        if executor.dtype not in hardware.tflops:
            known = ", ".join(hardware.tflops) or "none"
            raise ConfigError("executor.dtype", executor.dtype, f"hardware.tflops of {hardware.name} has {known}")
        if deployment.devices > 1 and not hardware.link_gb_s:
            text = f"{hardware.name} has no hardware.link_gb_s"
            raise ConfigError("executor.tensor_parallel", deployment.devices, text)
        stored, experts = {executor.weights}, executor.weights
        if isinstance(deployment.model, SparseConfig):
            formats = deployment.model.formats(executor.weights, executor.dtype)
            stored, experts = set(formats), formats.experts
        multiplied = {_MULTIPLIED.get(each) for each in stored}
        body = next(iter(multiplied)) if len(multiplied) == 1 else None
        chosen = _MULTIPLIED.get(experts) if body is None else None
        because = None
        if "nvfp4" in stored and "fp4" not in hardware.tflops:
            because = f"{hardware.name} has no arithmetic in fp4: nvfp4 is multiplied in {executor.dtype}"
        return cls(
            deployment.model,
            hardware,
            deployment.devices,
            executor.dtype,
            deployment.body_bytes,
            deployment.head_bytes,
            deployment.kv_bytes_per_token,
            body if body in hardware.tflops else None,
            deployment.expert_bytes,
            chosen if chosen == "fp4" and chosen in hardware.tflops else None,
            because,
        )

    def device_s(self, new_tokens: Counts, lengths: Counts, sampled: int) -> float:
        return self.step(new_tokens, lengths, sampled).total

    def run_s(self, new_tokens: Counts, lengths: Counts, sampled: int) -> list[float]:
        first, (read, pairs) = self.step(new_tokens, lengths[0], sampled), self._attended(new_tokens, lengths)
        attention = np.maximum(*self._attention(int(new_tokens.sum()), read, pairs))
        seconds: list[float] = (first.linear + attention + first.links + first.launches).tolist()
        return seconds

    def step(self, new_tokens: Counts, lengths: Counts, sampled: int) -> StepTime:
        """`new_tokens` [B] of each sequence, which has `lengths` [B] tokens with them; `sampled` rows of logits."""
        model, hardware, tokens = self.model, self.hardware, int(new_tokens.sum())
        read_s, flop_s = self._read_s, self._flop_s(self.dtype)
        body, head = model.active_parameters, model.vocab_size * model.hidden_size
        linear_s = self._flop_s(self.body_dtype or self.dtype)
        multiplying = 2 * body * tokens * linear_s
        if self.expert_dtype is not None and isinstance(model, SparseConfig):
            multiplying -= 2 * model.chosen_parameters * tokens * (linear_s - self._flop_s(self.expert_dtype))
        linear = max(self._body_read(tokens) * read_s, multiplying)
        if sampled:
            linear += max(self.head_bytes * read_s, 2 * head * sampled * flop_s)
        read, pairs = self._attended(new_tokens, lengths)
        return StepTime(
            linear=linear + len(new_tokens) * self._state_s,
            attention=max(self._attention(tokens, float(read), float(pairs))),
            links=self._links(tokens),
            launches=model.num_parts * LAUNCHES * hardware.launch_us * 1e-6,
        )

    def _body_read(self, tokens: int) -> float:
        """Bytes of the weights that so many tokens read."""
        if not isinstance(self.model, SparseConfig):
            return self.body_bytes
        experts = self.model.experts
        return self.body_bytes - self.expert_bytes * (1 - experts.met(tokens) / experts.count)

    def _flop_s(self, dtype: str) -> float:
        """Seconds of an operation on all devices."""
        return 1 / (self.hardware.tflops[dtype] * 1e12 * self.hardware.compute_efficiency * self.devices)

    def _attention(self, tokens: int, read: Number, pairs: Number) -> tuple[Number, Number]:
        """Seconds of moving K and V, and those of arithmetic."""
        operations = 4 * self.model.num_heads * self.model.head_dim * self._windows.total()
        moving: Number = self.kv_bytes_per_token * (tokens + read) * self._read_s
        return moving, operations * pairs * self._flop_s(self.dtype)

    @cached_property
    def _state_s(self) -> float:
        """Seconds of reading and writing the states of a sequence."""
        if not isinstance(self.model, SparseConfig) or (layer := self.model.states) is None:
            return 0.0
        states = self.model.state_layers * layer.state_bytes(1, DTYPE_BYTES[self.dtype])
        return 2 * states * self._read_s

    @cached_property
    def _read_s(self) -> float:
        """Seconds of a byte on all devices."""
        hardware = self.hardware
        return 1 / (hardware.bandwidth_gb_s * 1e9 * hardware.bandwidth_efficiency * self.devices)

    @cached_property
    def _windows(self) -> Counter[int | None]:
        """How many layers have each window."""
        return self.model.windows

    def _attended(self, new: Counts, lengths: Counts) -> tuple[Rates, Rates]:
        """Tokens whose K and V are read, and pairs of queries and tokens; both as means over the layers. For
        `lengths` [steps, B] of each step.
        """
        read, pairs = np.zeros(lengths.shape[:-1]), np.zeros(lengths.shape[:-1])
        for window, layers in self._windows.items():
            share, before = layers / self._windows.total(), lengths - new
            if window is None:
                read += share * lengths.sum(axis=-1)
                pairs += share * (attended_pairs(new, lengths) * self._per_pair(new)).sum(axis=-1)
                continue
            # The query at position p attends to min(p + 1, window) tokens: those before the window's width grow.
            growing = np.clip(window - before, 0, new)
            read += share * np.minimum(lengths, window - 1 + new).sum(axis=-1)
            grown = attended_pairs(growing, before + growing) + (new - growing) * window
            pairs += share * grown.sum(axis=-1)
        return read, pairs

    def _per_pair(self, new: Counts) -> int | Rates:
        """Arithmetic of a pair, in that of a head's K and V as wide as its K."""
        latent = self.model.latent if isinstance(self.model, SparseConfig) else None
        if latent is None:
            return 1
        rank, head = latent.rank, latent.nope + latent.rope
        made, met = head + latent.value, 2 * rank + latent.rope
        return np.where(new == 1, met, made) / (2 * head)

    def _links(self, tokens: int) -> float:
        if self.devices == 1:
            return 0.0
        model = self.model
        if not isinstance(model, SparseConfig) or (groups := model.division.data) == 1:
            return self._all_reduces(model.num_parts, self.devices, tokens)
        feed_forwards, within = model.dense_layers + model.experts.layers, self.devices // groups
        others = model.num_parts - feed_forwards
        among = self._all_reduces(others, within, -(-tokens // groups)) if within > 1 else 0.0
        return among + self._all_reduces(feed_forwards, self.devices, tokens)

    def _all_reduces(self, times: int, devices: int, tokens: int) -> float:
        hardware = self.hardware
        sent = 2 * (devices - 1) / devices * tokens * self.model.hidden_size * DTYPE_BYTES[self.dtype]
        pairs = devices / 2 if hardware.links_shared else 1
        used = min(1.0, (devices - 1) / hardware.link_peers) if hardware.link_peers else 1.0  # of a device's links
        rate = used * hardware.link_gb_s * 1e9 * hardware.link_efficiency
        once = sent / rate + hardware.collective_us * 1e-6
        return times * pairs * once
