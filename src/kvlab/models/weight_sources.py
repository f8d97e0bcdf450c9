"""Where a model's weights come from: random numbers, a directory, a GGUF file, or a hub."""

import torch

from kvlab.errors import WeightsError, shown
from kvlab.models.gguf import is_gguf
from kvlab.models.gguf_model import GgufWeights
from kvlab.models.hub import HubError
from kvlab.models.published import checkpoint
from kvlab.models.weights import DummyWeights, SafetensorsWeights, WeightSource


def open_weights(
    where: str, dtype: torch.dtype, device: torch.device | str, *, seed: int = 0, norm_weight: float = 1.0
) -> WeightSource:
    """`dummy`, a directory, a GGUF file, or a hub id (downloaded once); `seed` and `norm_weight` are those of
    DummyWeights.

    Raises WeightsError where no weights are found, ConfigError for a published model that was not fetched.
    """
    if where == "dummy":
        return DummyWeights(dtype, device, seed, norm_weight)
    try:
        path = checkpoint(where, ("*.safetensors", "*.json"))
    except HubError as error:
        raise WeightsError(
            f"model.weights={shown(where)}: no such directory, and the hub gave nothing ({error}); "
            "point it at a directory that holds model.safetensors"
        ) from error
    return (GgufWeights if is_gguf(path.name) else SafetensorsWeights)(path, dtype, device)
