"""The models that start, and the bytes that a rank keeps of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.runtime.initialization.initialize import units_of
from autopar.runtime.parameters.distribute import is_remote, local_part
from examples.plan_llama import Llama, Size

BIG = Size(width=6656, inner=17920, layers=60, heads=52, groups=52)
MEDIUM = Size(width=640, inner=1728, layers=10, heads=10, groups=10, vocabulary=8192)


def on_meta(size: Size) -> nn.Module:
    with torch.device("meta"):
        return Llama(size)


def tokens(device: str) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(8, 8, dtype=torch.long, device=device)
    return ids, ids


def shares(model: nn.Module) -> dict[str, int]:
    """Bytes of the whole model, of this rank's parts, and of the largest block."""
    parameters = dict(model.named_parameters())
    parts, units = [local_part(p) for p in parameters.values()], units_of(model)
    return {
        "whole": sum(p.nbytes for p in parameters.values()),
        "share": sum(part.nbytes for part in parts if not is_remote(part)),
        "block": max(sum(parameters[name].nbytes for name in unit.names) for unit in units),
    }
