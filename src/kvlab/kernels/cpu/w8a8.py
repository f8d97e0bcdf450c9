"""Products in int8 with rows of x rounded as they come (W8A8, dynamic per token), in PyTorch.

The native product (`linear_in_int8.hpp`) gives the same to the last bit. This is to be read and compared with.
"""

import torch

_SMALLEST = 1e-30  # smaller magnitudes count as 0


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of `x` `[rows, n]` as whole numbers from -127 to 127, int64, and the scale `[rows]` float32 that it
    is to be multiplied by: the row's largest magnitude / 127. The product with the scale's inverse is rounded once.
    """
    magnitude = x.float().abs().amax(dim=1)
    inverse = torch.tensor(127.0) / magnitude.clamp(min=_SMALLEST)
    return (x.double() * inverse.double()[:, None]).round().long(), magnitude / 127


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x` `[rows, inputs]` W^T + bias `[outputs]` for `weight` `[outputs, inputs]`, x and weight rounded to int8:
    `[rows, outputs]` float32. Sums of products are exact; they are rounded to float32, and behind each scale again.
    """
    numbers, scales = quantize(x)
    weights, weight_scales = quantize(weight)
    outputs = (numbers @ weights.T).float() * scales[:, None] * weight_scales
    return outputs if bias is None else outputs + bias.float()
