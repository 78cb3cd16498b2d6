"""Mixtures of experts, and what else chooses by row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.truth.registry import WIDTH, register

EXPERTS = 3


class _Experts(nn.Module):
    """A router and the weights of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(0.4 * torch.randn(EXPERTS, WIDTH, WIDTH))


@register("rows")
class SoftMixture(_Experts):
    """Every expert for every row, weighted."""

    def forward(self, h: Tensor) -> Tensor:
        gate = self.router(h).softmax(-1)
        return h + torch.einsum("be,bd,edf->bf", gate, h, self.weight).tanh()


@register("rows")
class TopTwoMixture(_Experts):
    """The best two experts of every row, and a loss that balances them over the batch."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        gate = self.router(h).softmax(-1)
        value, chosen = gate.topk(2, dim=-1)
        outs = torch.einsum("bd,bkdf->bkf", h, self.weight[chosen])
        load = nn.functional.one_hot(chosen, EXPERTS).sum(1).to(h.dtype).mean(0)
        balance = EXPERTS * (load * gate.mean(0)).sum()
        return h + (value[..., None] * outs).sum(1), 0.1 * balance


@register("rows")
class CapacityMixture(_Experts):
    """Experts take their first three rows; the others pass by."""

    def forward(self, h: Tensor) -> Tensor:
        gate = self.router(h).softmax(-1)
        value, chosen = gate.max(-1)
        hot = nn.functional.one_hot(chosen, EXPERTS)
        place = (hot.cumsum(0) * hot).sum(-1)
        taken = (place <= 3).to(h.dtype) * value
        out = torch.einsum("bd,bdf->bf", h, self.weight[chosen])
        return h + taken[:, None] * out.tanh()


@register("rows")
class ExpertChoice(_Experts):
    """Every expert takes the three rows that it likes most."""

    def forward(self, h: Tensor) -> Tensor:
        gate = self.router(h).softmax(-1)
        value, rows = gate.t().topk(3, dim=-1)
        outs = torch.bmm(h[rows], self.weight).tanh() * value[..., None]
        return h.index_add(0, rows.flatten(), outs.flatten(0, 1))


@register("rows")
class SinkhornRouting(_Experts):
    """Gates balanced over the batch by Sinkhorn's iteration."""

    def forward(self, h: Tensor) -> Tensor:
        plan = torch.exp(self.router(h))
        for _ in range(3):
            plan = plan / plan.sum(0, keepdim=True)
            plan = plan / plan.sum(1, keepdim=True)
        return h + torch.einsum("be,bd,edf->bf", plan, h, self.weight).tanh()


@register("rows")
class LoopedExperts(_Experts):
    """A loop over experts, each of which sees all rows behind a mask."""

    def forward(self, h: Tensor) -> Tensor:
        chosen = self.router(h).argmax(-1)
        out = h
        for expert in range(EXPERTS):
            mine = (chosen == expert).to(h.dtype)[:, None]
            out = out + mine * (h @ self.weight[expert]).tanh()
        return out


@register("rows")
class ImportanceLoss(_Experts):
    """The squared coefficient of variation of what experts get."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        gate = self.router(h).softmax(-1)
        importance = gate.sum(0)
        return h + gate @ self.weight.mean(1), importance.var() / importance.mean().square()


@register("rows")
class PackedExperts(_Experts):
    """Rows sorted by their expert, packed into equal groups, and put back."""

    def forward(self, h: Tensor) -> Tensor:
        chosen = self.router(h).argmax(-1)
        order = chosen.argsort(stable=True)
        packed = h[order]
        out = torch.einsum("bd,bdf->bf", packed, self.weight[chosen[order]])
        return h + torch.zeros_like(h).index_copy(0, order, out.tanh())
