"""An unmodified model of transformers over kvlab's cache: its attention, its K and V and its positions are ours."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model, revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.logging import disable_progress_bar

from kvlab.attention.base import AttentionBackend, AttentionSpec, check_attended, check_layout
from kvlab.errors import BackendError
from kvlab.kv.view import CacheView
from kvlab.models.config import TransformersConfig
from kvlab.models.decoder import Model
from kvlab.models.ops.base import LogitsOps, TopK
from kvlab.models.ops.torch_ops import TorchOps
from kvlab.models.transformers_plan import (
    SINKS,
    LayerCall,
    attention_of,
    build_empty,
    causal_model,
    read_values,
    stored_tensors,
)
from kvlab.models.weights import WeightSource


class TransformersDecoder(Model):
    """A decoder of transformers, one flat batch at a time.

    Each of the model's layers calls our attention function, which stores the step's K and V in the view and hands
    the queries to the backend `attention` with the layer's spec. The model keeps no cache of its own, and sees one
    sequence of T tokens at the positions of the view.

    Parameters are taken from `weights` one by one, under transformers' names; transformers loads no file.
    """

    def __init__(
        self,
        config: TransformersConfig,
        weights: WeightSource,
        attention: AttentionBackend,
        specs: Sequence[AttentionSpec],
        ops: LogitsOps | None = None,
    ) -> None:
        self.config = config
        self.attention = attention
        self._specs, self._ops = specs, ops or TorchOps()
        described = read_values(json.loads(config.values))
        kind = causal_model(described)
        if kind is None:
            raise BackendError(f"{config.family}: transformers has no causal language model of this family")
        dtype, device = getattr(torch, specs[0].dtype), torch.device(specs[0].device)
        with torch.device(device), no_init_weights():
            self._model = build_empty(kind, described, dtype).requires_grad_(False)
        self._model.tie_weights()
        _fill(self._model, weights, device, dtype)
        self._planned = [
            LayerCall(
                *(layer, spec.num_heads, spec.num_kv_heads, spec.head_dim, config.value_dim),
                *(spec.scale, spec.sliding_window, spec.soft_cap, spec.has_sinks),
            )
            for layer, spec in enumerate(specs)
        ]

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> torch.Tensor:
        """See Model. Raises BackendError where the model does not call attention once in each layer, as planned."""
        check_layout(self.attention, view)
        called: list[int] = []

        def attend(
            call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, others: Mapping[str, Any]
        ) -> torch.Tensor:
            layer, tokens = len(called), (query.shape[2], key.shape[2])
            planned = self._planned[layer] if layer < len(self._planned) else None
            if call != planned or tokens != (len(token_ids), len(token_ids)):
                text = f"{planned} over {len(token_ids)} tokens, and call {layer} asks for {call} over {tokens}"
                raise BackendError(f"{self.config.family}: attention was planned as {text}")
            called.append(layer)
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            seen = view.of_layer(layer)
            seen.update(layer, k, functional.pad(v, (0, call.head_dim - call.value_dim)))
            sinks = {"sinks": others[SINKS]} if call.has_sinks else {}
            attended = self.attention.forward(q.contiguous(), seen, layer, self._specs[layer], **sinks)
            check_attended(self.attention, attended, q)
            return attended[None, ..., : call.value_dim]

        with attention_of(attend):
            logits: torch.Tensor = self._model(
                input_ids=token_ids[None],
                position_ids=view.positions[None],
                use_cache=False,
                logits_to_keep=rows,
                return_dict=True,
            ).logits[0]
        if len(called) < len(self._planned):
            text = f"called in {len(called)} of {len(self._planned)} layers"
            raise BackendError(f"{self.config.family}: attention was {text}; it has to be called in each")
        return logits if len(logits) == len(rows) else logits[rows]

    @torch.inference_mode()
    def forward_top1(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> TopK:
        return self._ops.topk(self.forward(token_ids, view, rows))

    def hidden(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> torch.Tensor:
        """The logits: a model of transformers is asked for nothing else."""
        return self.forward(token_ids, view, rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def _fill(model: PreTrainedModel, weights: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
    """Take every parameter, a tied one once. What a checkpoint stores under other names, or in other pieces (the
    experts of a layer one by one), transformers puts together.
    """
    own = stored_tensors(model)
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in own.items()}
    pieces: dict[str, torch.Tensor] = {}
    for name, tensor in revert_weight_conversion(model, empty).items():
        taken = weights.take(name, tuple(tensor.shape))
        if name in own and own[name].shape == taken.shape:
            own[name].data = taken
        else:
            pieces[name] = taken
    weights.finish()
    if pieces:
        disable_progress_bar()
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        config = LoadStateDictConfig(dtype=dtype, device_map={"": device}, weight_mapping=mapping)
        convert_and_load_state_dict_in_model(model, pieces, config)
