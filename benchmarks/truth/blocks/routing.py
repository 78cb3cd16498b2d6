"""Mixtures of experts, and means and sums of rows by label."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import CLASSES, WIDTH, define_all, linear, register

EXPERTS = 3
MIXTURE = {
    "router": linear(WIDTH, EXPERTS),
    "weight": lambda: nn.Parameter(0.4 * torch.randn(EXPERTS, WIDTH, WIDTH)),
}


def _weighted(m, h: Tensor, gate: Tensor) -> Tensor:
    return torch.einsum("be,bd,edf->bf", gate, h, m.weight).tanh()


def _chosen(m, h: Tensor, expert: Tensor) -> Tensor:
    return torch.einsum("bd,bdf->bf", h, m.weight[expert])


@register("rows", **MIXTURE)
def TopTwoMixture(m, h: Tensor) -> tuple[Tensor, Tensor]:
    """The best two experts of every row, and a loss that balances them over the batch."""
    gate = m.router(h).softmax(-1)
    value, chosen = gate.topk(2, dim=-1)
    outs = torch.einsum("bd,bkdf->bkf", h, m.weight[chosen])
    load = F.one_hot(chosen, EXPERTS).sum(1).to(h.dtype).mean(0)
    balance = EXPERTS * (load * gate.mean(0)).sum()
    return h + (value[..., None] * outs).sum(1), 0.1 * balance


@register("rows", **MIXTURE)
def CapacityMixture(m, h: Tensor) -> Tensor:
    """Experts take their first three rows; the others pass by."""
    value, chosen = m.router(h).softmax(-1).max(-1)
    hot = F.one_hot(chosen, EXPERTS)
    taken = ((hot.cumsum(0) * hot).sum(-1) <= 3).to(h.dtype) * value
    return h + taken[:, None] * _chosen(m, h, chosen).tanh()


@register("rows", **MIXTURE)
def ExpertChoice(m, h: Tensor) -> Tensor:
    """Every expert takes the three rows with its largest gates."""
    value, rows = m.router(h).softmax(-1).t().topk(3, dim=-1)
    outs = torch.bmm(h[rows], m.weight).tanh() * value[..., None]
    return h.index_add(0, rows.flatten(), outs.flatten(0, 1))


@register("rows", **MIXTURE)
def SinkhornRouting(m, h: Tensor) -> Tensor:
    gate = torch.exp(m.router(h))
    for _ in range(3):
        gate = gate / gate.sum(0, keepdim=True)
        gate = gate / gate.sum(1, keepdim=True)
    return h + _weighted(m, h, gate)


@register("rows", **MIXTURE)
def PackedExperts(m, h: Tensor) -> Tensor:
    """Rows sorted by their expert, and put back."""
    chosen = m.router(h).argmax(-1)
    order = chosen.argsort(stable=True)
    out = _chosen(m, h[order], chosen[order]).tanh()
    return h + torch.zeros_like(h).index_copy(0, order, out)


define_all(
    "rows",
    {
        "accumulated": lambda h, labels: (
            h
            + 0.3
            * h.new_zeros(CLASSES, WIDTH).index_put((labels,), h, accumulate=True)[labels].tanh()
        ),
        "weighted_mean_centred": lambda h, weights: h - weights @ h / weights.sum(),
    },
)


@register("rows")
def reduced_maxima(h: Tensor, labels: Tensor) -> Tensor:
    index = labels[:, None].expand_as(h)
    largest = h.new_full((CLASSES, WIDTH), -5.0).scatter_reduce(0, index, h, "amax")
    return h - 0.3 * largest[labels]
