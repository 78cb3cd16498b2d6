"""Convolutions with channels-last weights, whose weights autopar stores contiguous.

A convolution computes channels-last if its weight or its input is. Captured ones whose weight was
get such inputs, so activations keep the format, and sharded weights need none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The format by number of dims."""

_CONVOLUTIONS = nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d
_MARK = "_autopar_channels_last"


def mark_channels_last(model: nn.Module) -> None:
    """Marks the convolutions with channels-last weights, before the weights are copied."""
    for module in model.modules():
        if _is_channels_last(module):
            setattr(module, _MARK, True)


def channels_last_dims(model: nn.Module) -> Mapping[nn.Module, int]:
    """The number of dims of each convolution that has, or had, a channels-last weight."""
    return {
        module: module.weight.dim()
        for module in model.modules()
        if isinstance(module, _CONVOLUTIONS)
        and (_MARK in vars(module) or _is_channels_last(module))
    }


def in_channels_last(value: Any, dims: int) -> Any:
    """An argument of such a convolution: a tensor of as many dims is made channels-last."""
    if not isinstance(value, Tensor) or value.dim() != dims:
        return value
    return value.contiguous(memory_format=FORMATS[dims])


def _is_channels_last(module: nn.Module) -> bool:
    weight = module.weight if isinstance(module, _CONVOLUTIONS) else None
    if weight is None or weight.is_contiguous():
        return False
    return weight.is_contiguous(memory_format=FORMATS[weight.dim()])
