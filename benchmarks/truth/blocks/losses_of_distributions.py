"""Losses of the distribution of the batch: moments, kernels, clusters and densities."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.truth.registry import WIDTH, linear, register

PROTOTYPES = {"prototypes": linear(WIDTH, 4, bias=False)}


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    """Mean of a Gaussian kernel over all pairs."""
    return torch.exp(-(a[:, None] - b[None]).square().sum(-1) / 4).mean()


@register("rows_head")
def mmd(h: Tensor, target: Tensor) -> Tensor:
    """Maximum mean discrepancy."""
    return _kernel(h, h) + _kernel(target, target) - 2 * _kernel(h, target)


@register("rows_head")
def vicreg(h: Tensor, target: Tensor) -> Tensor:
    """Invariance, variance and covariance."""
    spread = F.relu(2 - torch.sqrt(h.var(0) + 1e-4)).mean()
    centred = h - h.mean(0)
    covariance = centred.t() @ centred / (h.shape[0] - 1)
    off = covariance.square().sum() - covariance.diagonal().square().sum()
    return F.mse_loss(h, target) + spread + off / WIDTH


@register("rows_head", **PROTOTYPES)
def Swav(m, h: Tensor, target: Tensor) -> Tensor:
    """Targets balanced over the batch by Sinkhorn's iteration."""
    scores = m.prototypes(F.normalize(h, dim=1))
    with torch.no_grad():
        q = torch.exp(m.prototypes(F.normalize(target, dim=1)) / 0.5).t()
        q = q / q.sum()
        for _ in range(3):
            q = q / q.sum(1, keepdim=True) / q.shape[0]
            q = q / q.sum(0, keepdim=True) / h.shape[0]
        q = (q * h.shape[0]).t()
    return -(q * (scores / 0.3).log_softmax(-1)).sum(1).mean()


@register("rows_head", **PROTOTYPES, centre=lambda: torch.zeros(1, 4))
def Dino(m, h: Tensor, target: Tensor) -> Tensor:
    """Teacher outputs centred by a moving mean over batches."""
    teacher = m.prototypes(target).detach()
    wanted = ((teacher - m.centre) / 0.5).softmax(-1)
    m.centre = 0.9 * m.centre + 0.1 * teacher.mean(0, keepdim=True)
    return -(wanted * m.prototypes(h).log_softmax(-1)).sum(-1).mean()


@register("rows_head", **PROTOTYPES)
def MeanEntropy(m, h: Tensor) -> Tensor:
    """Confident rows and a mean prediction of high entropy (MSN, SCAN)."""
    p = m.prototypes(h).softmax(-1)
    mean = p.mean(0)
    return -(p * p.log()).sum(1).mean() + 2 * (mean * mean.log()).sum()


@register("rows_head")
def coding_rate(h: Tensor) -> Tensor:
    """The log-determinant of the covariance (MCR2)."""
    matrix = torch.eye(WIDTH, dtype=h.dtype) + h.t() @ h / h.shape[0]
    return -0.5 * torch.logdet(matrix) + 0.05 * h.square().mean()
