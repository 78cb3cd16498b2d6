"""Norms whose statistics run over rows, and norms of weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from benchmarks.truth.registry import WIDTH, define, define_all, register


def _standardised(h: Tensor, *dims: int) -> Tensor:
    return (h - h.mean(dims, keepdim=True)) / (h.std(dims, keepdim=True) + 0.1)


define_all(
    "rows",
    {
        "standardised": lambda h: _standardised(h, 0),
        "column_norms": lambda h: F.normalize(h, dim=0) * h.shape[0] ** 0.5,
        "infinity_norm": lambda h: h / (0.5 + torch.linalg.vector_norm(h, torch.inf, 0)),
        "layer_norm_over_batch": lambda h: F.layer_norm(h, tuple(h.shape)),
    },
)
define_all(
    "image",
    {
        "norm_over_batch_and_pixels": lambda h: _standardised(h, 0, 2, 3),
        "rows_as_channels": lambda h: F.group_norm(h.flatten(0, 1)[None], h.shape[0] * 2).view_as(
            h
        ),
    },
)

_NORMS = {
    "BatchNorm": ("rows", lambda: nn.BatchNorm1d(WIDTH)),
    "CumulativeBatchNorm": ("rows", lambda: nn.BatchNorm1d(WIDTH, momentum=None)),
    "UntrackedBatchNorm": (
        "rows",
        lambda: nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False),
    ),
    "BatchNorm2d": ("image", lambda: nn.BatchNorm2d(WIDTH)),
    "InstanceNorm": (
        "image",
        lambda: nn.InstanceNorm2d(WIDTH, affine=True, track_running_stats=True),
    ),
    "PlainInstanceNorm": ("image", lambda: nn.InstanceNorm2d(WIDTH)),
    "GroupNorm": ("image", lambda: nn.GroupNorm(3, WIDTH)),
    "LayerNorm": ("sequence", lambda: nn.LayerNorm(WIDTH)),
}
for _name, (_kind, _make) in _NORMS.items():
    _plain = _name in ("GroupNorm", "LayerNorm")
    define(_kind, _name, lambda m, h: m.norm(h), {"norm": _make}, plain=_plain)


@register("rows", norm=lambda: nn.BatchNorm1d(WIDTH))
def FrozenBatchNorm(m, h: Tensor) -> Tensor:
    n = m.norm
    return F.batch_norm(h, n.running_mean, n.running_var, n.weight, n.bias)


@register("rows", divides=2, norm=lambda: nn.BatchNorm1d(WIDTH, momentum=0.2))
def GhostBatchNorm(m, h: Tensor) -> Tensor:
    """Batch norm of each half of the batch."""
    return torch.cat([m.norm(half) for half in h.chunk(2)])


@register("sequence", norm=lambda: nn.BatchNorm1d(WIDTH))
def BatchNormOverTokens(m, h: Tensor) -> Tensor:
    return m.norm(h.transpose(1, 2)).transpose(1, 2)


@register("rows", linear=lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))
def SpectralNormed(m, h: Tensor) -> Tensor:
    """The norm of the weight is a buffer that changes."""
    return h + m.linear(h).tanh()


@register("rows")
def whitened(h: Tensor) -> Tensor:
    centred = h - h.mean(0)
    covariance = centred.t() @ centred / h.shape[0] + torch.eye(WIDTH, dtype=h.dtype)
    factor = torch.linalg.cholesky(covariance)
    return torch.linalg.solve_triangular(factor, centred.t(), upper=False).t()
