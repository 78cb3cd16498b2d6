"""Blocks that treat every row by itself, as most of most models does."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.truth.registry import WIDTH, define_all, linear, register

define_all(
    "rows",
    {
        "softmax_of_features": lambda h: h + WIDTH * h.softmax(-1),
        "sorted_features": lambda h: h + 0.5 * h.sort(-1).values,
        "normalised_rows": lambda h: F.normalize(h, dim=-1) * WIDTH**0.5,
        "weighted_rows": lambda h, weights: h * weights[:, None],
        "shifted_by_target": lambda h, target: torch.addcmul(h, target, h.sigmoid(), value=0.5),
    },
    plain=True,
)


def _two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


@register("rows", plain=True, norm=lambda: nn.LayerNorm(WIDTH), net=_two_layers)
def FeedForward(m, h: Tensor) -> Tensor:
    return h + m.net(m.norm(h))


@register("rows", plain=True, gate=linear(WIDTH, 2 * WIDTH))
def Gated(m, h: Tensor) -> Tensor:
    value, gate = m.gate(h).chunk(2, dim=-1)
    return h + value * torch.sigmoid(gate)


@register("rows", plain=True, net=_two_layers)
def Checkpointed(m, h: Tensor) -> Tensor:
    return h + checkpoint(m.net, h, use_reentrant=False)
