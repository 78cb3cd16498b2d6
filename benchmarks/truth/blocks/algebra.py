"""Products, decompositions and transforms in which the batch is a dim of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.truth.registry import WIDTH, define_all, register

define_all(
    "rows",
    {
        "third_order": lambda h: (
            h + 0.1 * torch.einsum("ai,bi,bj,cj->aj", h, h, h, h) / h.shape[0] ** 2
        ),
        "spectrum": lambda h: h + 0.1 * torch.tanh(torch.fft.rfft(h, dim=0).abs().square().mean(0)),
        "low_pass": lambda h: torch.fft.irfft(torch.fft.rfft(h, dim=0) * 0.7, n=h.shape[0], dim=0),
        "distances": lambda h: h + torch.exp(-torch.cdist(h, h + 0.5)) @ h / h.shape[0],
        "covariance": lambda h: h + h @ torch.cov(h.t()).tanh(),
        "inverse_weighted": lambda h: (
            h @ torch.linalg.inv(torch.eye(WIDTH, dtype=h.dtype) + h.t() @ h / h.shape[0])
        ),
        "contracted": lambda h: h + h @ torch.tensordot(h, h, ([0], [0])).tanh() / h.shape[0],
        "matrix_vector": lambda h, weights: h + torch.addmv(h.mean(0), h.t(), weights, alpha=0.2),
    },
)


@register("rows", divides=2)
def batched_products(h: Tensor) -> Tensor:
    groups = h.view(2, -1, WIDTH)
    scores = torch.baddbmm(groups.new_zeros(1), groups, groups.transpose(1, 2)).tanh()
    return h + torch.bmm(scores, groups).reshape(-1, WIDTH) / h.shape[0]


@register("rows", form=lambda: nn.Bilinear(WIDTH, WIDTH, 1))
def LearntAffinity(m, h: Tensor) -> Tensor:
    """A bilinear form of pairs of rows, softmaxed over the second."""
    n = h.shape[0]
    scores = m.form(h.repeat_interleave(n, dim=0), h.repeat(n, 1)).view(n, n)
    return h + scores.softmax(1) @ h
