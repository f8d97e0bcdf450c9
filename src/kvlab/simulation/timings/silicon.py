"""A step's time as the sum of operations that were measured on the device. See kvlab.simulation.tables.

A step over T new tokens of B sequences on N devices, each of which has 1/N of every matrix and of every head:

    linear      the GEMMs of QKV, output, gate and up, and down over T rows, what lies between them, the embedding,
                and, for N > 1, two all-reduces of T rows in each layer; small ones end in the norm behind them,
                where the framework's version has that; and 1/N of `framework.device_token_us` for each row.
                Up to 256 rows a GEMM takes no longer than two of more rows were measured to take.
                Experts whose router nothing levels take as much less as the fewer that are met
                (kvlab.simulation.expert_load)
    head        the GEMM of the output layer, over as many rows as are sampled, in 16 bits
    prefill     each chunk with its cached prefix: 1/k of what a batch of k such takes, k being the step's chunks
    decode      the sequences with one new token at their mean context, and no less than the longest alone

A layer with a window attends to no more than that, and a chunk that is longer than the window counts as several.
Chunks, prefixes and contexts are rounded to 7 significant bits, so that nearly every step is found in a table of
this module's own.
"""

from __future__ import annotations

from functools import cache
from operator import add

import numpy as np

from kvlab.config import EngineConfig, FrameworkConfig, HardwareConfig
from kvlab.errors import ConfigError
from kvlab.models.config import DecoderConfig
from kvlab.models.mamba import Mamba2
from kvlab.models.sparse import Formats, SparseConfig, is_mixture
from kvlab.simulation.accuracy import how_sure
from kvlab.simulation.expert_load import dealt, drawn
from kvlab.simulation.operations import FEW, VARIANCES, operations, sparse_operations
from kvlab.simulation.tables import INSTEAD, SMALLEST, MeasuredTables, UnmeasuredError
from kvlab.simulation.timings import TIMINGS
from kvlab.simulation.timings.base import Counts, Deployment, StepTiming, set_kernels, set_rates
from kvlab.simulation.unmeasured import KV_TYPES, unmeasured, unmeasured_sparse

_BITS = 7
_OF_SPARSE = "experts are loaded by the power law of their measurements"
_OF_MAMBA = "states of Mamba-2 take what moving them does"
#: What the tables call the types of weights.
_WEIGHTS = {"bfloat16": "bfloat16", "float16": "bfloat16", "int8": "int8_wo"}
_WEIGHTS |= {name: name for name in ("nvfp4", "int4_wo")}
_GROUPED = {"int4_wo_g32": "int4_wo"}  # groups of numbers that share a scale are not told apart
_FP8 = {"dynamic": "fp8", "static": "fp8_static", "block": "fp8_block"}


@TIMINGS.register("silicon")
class SiliconTiming(StepTiming):
    """Adds up measured operations of a model that is divided among devices; `weights` and `kv` are types as the
    tables call them.
    """

    def __init__(
        self,
        tables: MeasuredTables,
        model: DecoderConfig,
        devices: int,
        weights: str,
        kv: str,
        formats: Formats | None = None,
        beyond_us: float = 0.0,
    ) -> None:
        """`formats`: types of a mixture's matrices; `beyond_us`: what a row takes on these devices beyond the
        measured operations. Raises UnmeasuredError for shapes and types that the tables lack."""
        self._groups = 1  # of devices, that share the sequences
        self._tables, self._windows = tables, model.windows
        about, is_sparse = (tables.framework, tables.device), is_mixture(model)
        sure = how_sure(*about, is_sparse=is_sparse, states=model.states_called)
        is_moved = isinstance(model, SparseConfig) and isinstance(model.states, Mamba2)
        because = _OF_SPARSE if is_sparse else None, _OF_MAMBA if is_moved else None, sure
        self.because = "; ".join(filter(None, because)) or None
        if isinstance(model, SparseConfig):
            found = sparse_operations(tables, model, formats or Formats(*[weights] * 4), kv)
            self._groups = model.division.data
        else:
            found = operations(tables, model, devices, weights, kv)
        self._model, self._beyond_us = model, beyond_us
        self._formats = frozenset(formats or [weights])
        self._few = [tables.compile([operation]) for operation in found.few]
        self._specs = {name: tables.compile(each) for name, each in found._asdict().items() if name != "few"}
        self._has_variances, self._has_uneven = bool(found.variances), bool(found.even)
        self._fused_rows = self._most_fused_rows()
        self._rows_s = cache(lambda spec, rows: tables.seconds(spec, 1, rows, prefill=True))
        self._linear_s, self._experts_s = cache(self._all_linear_s), cache(self._all_experts_s)
        self._decode_s, self._prefill_s = cache(self._one_decode_s), cache(self._one_prefill_s)
        self._states_s = cache(self._all_states_s)
        self.device_s(np.array([1, 2]), np.array([2, 2]), 2)  # what is not in the tables is found here

    @classmethod
    def of(cls, deployment: Deployment) -> SiliconTiming:
        config, model, devices = deployment.config, deployment.model, deployment.devices
        if config.executor.dtype not in KV_TYPES:
            known = "bfloat16 and float16"
            raise ConfigError("executor.dtype", config.executor.dtype, f"timing=silicon has {known}; {INSTEAD}")
        if config.kv_dtypes[0] != config.kv_dtypes[1] or config.kv_dtypes[0] not in KV_TYPES:
            known = f"K and V in one of {', '.join(KV_TYPES)}"
            raise ConfigError("kv.dtype", config.kv_dtype, f"timing=silicon has {known}; {INSTEAD}")
        tables = MeasuredTables(deployment.hardware, config.framework, devices)
        weights, kv = config.executor.weights_dtype, KV_TYPES[config.kv_dtypes[0]]
        types = _WEIGHTS | {"fp8": _FP8[config.framework.fp8_scales]}
        if isinstance(model, SparseConfig):
            return cls._of_sparse(tables, model, config, types, kv)
        try:
            beyond_us = config.framework.device_token_us / devices
            return cls(tables, model, devices, types[weights], kv, beyond_us=beyond_us)
        except UnmeasuredError:
            raise unmeasured(
                tables, config.model.name, model, devices, (weights, config.kv_dtypes[0]), types
            ) from None

    @classmethod
    def _of_sparse(
        cls, tables: MeasuredTables, model: SparseConfig, config: EngineConfig, types: dict[str, str], kv: str
    ) -> SiliconTiming:
        types = types | _GROUPED
        stored = model.formats(config.executor.weights, config.executor.dtype)
        formats = Formats(*(types.get(each, each) for each in stored))
        if formats.experts == "fp8_static":
            formats = formats._replace(experts="fp8")
        try:
            beyond_us = config.framework.device_token_us / model.division.tensor
            return cls(tables, model, model.division.devices, formats.attention, kv, formats, beyond_us)
        except UnmeasuredError as error:
            stored_so = formats.attention, formats.experts, kv
            raise unmeasured_sparse(tables, config.model.name, model, stored_so, error) from None

    @property
    def description(self) -> str:
        return f"silicon ({self._tables.name})"

    def unread(self, hardware: HardwareConfig, framework: FrameworkConfig) -> list[str]:
        kernels, name = framework.expert_kernels, self._tables.name
        lacks = {
            "the model has no weights in fp8": ("fp8_scales", _FP8[framework.fp8_scales] not in self._formats),
            "the model has no experts": ("expert_kernels", not is_mixture(self._model)),
            f"{name} lacks such kernels for the model's experts": (
                "expert_kernels",
                is_mixture(self._model) and kernels != "tables" and not self._tables.has_kernels,
            ),
            "no all-reduce ends in the norm behind it": (
                "fused_allreduce_mib",
                bool(framework.fused_allreduce_mib) and not self._fused_rows,
            ),
        }
        unread = self._unread(set_rates(hardware), "roofline")
        for why, (setting, is_unread) in lacks.items():
            for written in set_kernels(framework, [setting]) if is_unread else ():
                unread.append(f"{written} has no effect here: {why}")
        return unread

    def device_s(self, new_tokens: Counts, lengths: Counts, sampled: int) -> float:
        return self.run_s(new_tokens, lengths[None], sampled)[0]

    def run_s(self, new_tokens: Counts, lengths: Counts, sampled: int) -> list[float]:
        if (groups := self._groups) == 1:
            return self._group_s(new_tokens, lengths, sampled)
        # The experts of all wait for the group that takes longest.
        every = [(new_tokens[first::groups], lengths[:, first::groups]) for first in range(groups)]
        found = [self._group_s(new, own, -(-sampled // groups)) for new, own in every if len(new)]
        experts_s = self._experts_s(int(new_tokens.sum()))
        return [max(seconds) + experts_s for seconds in zip(*found, strict=True)]

    def _most_fused_rows(self) -> float:
        """Of a step whose all-reduces end in the norm behind them; none where groups share the sequences: norms are
        then between all-reduces and what hands tokens to the experts.
        """
        tables = self._tables
        fused_rows = 0.0 if self._groups > 1 else tables.fused_bytes / (2 * self._model.hidden_size)
        if fused_rows:
            try:
                tables.fused_link_seconds(self._specs["links"], 1)
            except UnmeasuredError:
                return 0.0
        return fused_rows

    def _all_linear_s(self, rows: int) -> float:
        """All that is computed of each of so many tokens of one group of devices, and links between these."""
        unmet_s = self._unmet_s(rows) if self._groups == 1 else 0.0
        return self._products_s(rows) + unmet_s + self._between_s(rows) + rows * self._beyond_us * 1e-6

    def _products_s(self, rows: int) -> float:
        if rows > FEW:
            return self._tables.seconds(self._specs["linear"], 1, rows, prefill=True)
        # With more rows, as graphs pad them, none takes longer: what does in the tables was measured badly.
        more, of = 1 << rows.bit_length(), self._rows_s
        return sum(min(of(spec, rows), max(of(spec, more), of(spec, 2 * more))) for spec in self._few)

    def _between_s(self, rows: int) -> float:
        """Norms and all-reduces."""
        tables, specs, small_s = self._tables, self._specs, 0.0
        if self._has_variances:  # below the smallest that was measured the tables go on towards nothing
            small_s = tables.link_seconds(specs["variances"], max(rows, SMALLEST // VARIANCES))
        small_s += tables.seconds(specs["norms"], 1, rows, prefill=True)
        links_s = tables.fused_link_seconds if rows <= self._fused_rows else tables.link_seconds
        return small_s + links_s(specs["links"], rows)

    def _unmet_s(self, rows: int) -> float:
        """What other experts are met than were measured, as seconds to add: mostly fewer, below 0."""
        if not isinstance(self._model, SparseConfig) or not self._has_uneven:
            return 0.0
        mixture, even = self._model.experts, self._specs["even"]

        def met_s(experts: float) -> float:
            choices = min(experts, mixture.count) / mixture.active  # of so many tokens, which meet as many
            before, share = int(choices), choices % 1
            ends = [self._rows_s(even, max(1, before)), self._rows_s(even, before + 1)]
            return float((1 - share) * ends[0] + share * ends[1])

        shape = rows, mixture.count, mixture.active
        return self._rows_s(self._specs["uneven"], rows) * (met_s(drawn(*shape)) / met_s(dealt(*shape)) - 1)

    def _all_experts_s(self, rows: int) -> float:
        """Experts that all groups share, of their tokens together, and handing these to them and back."""
        tables, specs = self._tables, self._specs
        experts_s = tables.seconds(specs["experts"], 1, rows, prefill=True) + self._unmet_s(rows)
        return experts_s + tables.exchange_seconds(specs["exchange"], specs["across"], -(-rows // self._groups))

    def _one_decode_s(self, batch: int, context: int) -> float:
        return self._tables.seconds(self._specs["decode"], batch, context, prefill=False)

    def _one_prefill_s(self, batch: int, new: int, before: int) -> float:
        return self._tables.seconds(self._specs["prefill"], batch, new, before, prefill=True)

    def _all_states_s(self, batch: int, new: int) -> float:
        """Of all layers with a state, of sequences with so many `new` tokens each."""
        spec = self._specs["state_prefill" if new > 1 else "state_decode"]
        return self._tables.seconds(spec, batch, new, prefill=new > 1) if self._model.has_states else 0.0

    def _group_s(self, new_tokens: Counts, lengths: Counts, sampled: int) -> list[float]:
        """Of the sequences of one group of devices, each step's."""
        decoding = new_tokens == 1
        batch = int(np.count_nonzero(decoding))
        same_s: float = self._linear_s(int(new_tokens.sum()))
        if sampled:
            same_s += self._rows_s(self._specs["head"], sampled)
        seconds = [same_s] * len(lengths)
        if batch:
            contexts = lengths if batch == len(new_tokens) else lengths[:, decoding]
            seconds = list(map(add, seconds, self._decoding_s(contexts)))
        if batch < len(new_tokens):
            chunks = new_tokens[~decoding]
            before = (lengths[:, ~decoding] - chunks).tolist()
            each = (self._prefilling_s(chunks.tolist(), cached) for cached in before)
            seconds = list(map(add, seconds, each))
        return seconds

    def _decoding_s(self, contexts: Counts) -> list[float]:
        """Of each step, which has a row of `contexts`."""
        batch = contexts.shape[1]
        seconds = [self._states_s(batch, 1)] * len(contexts)
        for window, layers in self._windows.items():
            seen = contexts if window is None else np.minimum(contexts, window)
            means = _all_rounded(np.rint(seen.sum(axis=1) / batch).astype(np.int64)).tolist()
            longest = _all_rounded(seen.max(axis=1)).tolist()
            for step, (mean, most) in enumerate(zip(means, longest, strict=True)):
                seconds[step] += layers * max(self._decode_s(batch, mean), self._decode_s(1, most))
        return seconds

    def _prefilling_s(self, new: list[int], before: list[int]) -> float:
        seconds = sum(self._states_s(len(new), _rounded(tokens)) for tokens in new) / len(new)
        for window, layers in self._windows.items():
            chunks = list(zip(new, before, strict=True))
            if window is not None:
                chunks = [
                    (min(window, tokens - start), min(window - 1, cached + start))
                    for tokens, cached in chunks
                    for start in range(0, tokens, window)
                ]
            batch = len(chunks)
            chunk_s = (self._prefill_s(batch, _rounded(tokens), _rounded(cached)) for tokens, cached in chunks)
            seconds += layers * sum(chunk_s) / batch
        return seconds


def _rounded(count: int) -> int:
    """`count` to `_BITS` significant bits."""
    shift = count.bit_length() - _BITS
    return count if shift <= 0 else (count + (1 << (shift - 1))) >> shift << shift


def _all_rounded(counts: Counts) -> Counts:
    """The same of many."""
    shift = np.maximum(np.frexp(counts)[1] - _BITS, 0)
    rounded: Counts = (counts + (1 << shift >> 1)) >> shift << shift
    return rounded
