"""Norms whose statistics run over rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from benchmarks.truth.registry import WIDTH, register


@register("rows")
class BatchNorm(nn.BatchNorm1d):
    """Batch norm as it is."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h)


@register("rows")
class CumulativeBatchNorm(nn.BatchNorm1d):
    """`momentum=None`: running statistics are means over all batches."""

    def __init__(self) -> None:
        super().__init__(WIDTH, momentum=None)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h)


@register("rows")
class UntrackedBatchNorm(nn.BatchNorm1d):
    """Without running statistics and without weights."""

    def __init__(self) -> None:
        super().__init__(WIDTH, affine=False, track_running_stats=False)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h)


@register("rows")
class FrozenBatchNorm(nn.BatchNorm1d):
    """Batch norm by its running statistics."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return F.batch_norm(h, self.running_mean, self.running_var, self.weight, self.bias)


@register("rows", divides=2)
class GhostBatchNorm(nn.BatchNorm1d):
    """Batch norm of each half of the batch."""

    def __init__(self) -> None:
        super().__init__(WIDTH, momentum=0.2)

    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([super(GhostBatchNorm, self).forward(part) for part in h.chunk(2)])


@register("rows")
def standardised(h: Tensor) -> Tensor:
    return (h - h.mean(0)) / (h.std(0) + 0.1)


@register("rows")
def standardised_by_variance(h: Tensor) -> Tensor:
    var, mean = torch.var_mean(h, dim=0, unbiased=False, keepdim=True)
    return (h - mean) * torch.rsqrt(var + 0.1)


@register("rows")
def whole_batch_norm(h: Tensor) -> Tensor:
    """Divided by the norm of the whole batch."""
    return h / (0.1 + h.norm()) * h.shape[0] ** 0.5


@register("rows")
def column_norms(h: Tensor) -> Tensor:
    return F.normalize(h, dim=0) * h.shape[0] ** 0.5


@register("rows")
def one_norm(h: Tensor) -> Tensor:
    return h / (0.1 + torch.linalg.vector_norm(h, ord=1, dim=0)) * h.shape[0]


@register("rows")
def largest_in_column(h: Tensor) -> Tensor:
    return h / (0.5 + torch.linalg.vector_norm(h, ord=float("inf"), dim=0))


@register("rows")
def layer_norm_over_all(h: Tensor) -> Tensor:
    """`layer_norm` whose shape contains the batch."""
    return F.layer_norm(h, tuple(h.shape))


@register("rows")
def layer_norm_of_columns(h: Tensor) -> Tensor:
    return F.layer_norm(h.t(), (h.shape[0],)).t()


@register("rows")
class WeightNormed(nn.Module):
    """A layer whose weight is normed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.linear(h).tanh()


@register("rows")
class SpectralNormed(nn.Module):
    """A layer whose weight is divided by its largest singular value: buffers change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.linear(h).tanh()


@register("rows")
def whitened(h: Tensor) -> Tensor:
    """Whitened by the Cholesky factor of the covariance."""
    centred = h - h.mean(0)
    covariance = centred.t() @ centred / h.shape[0] + torch.eye(WIDTH, dtype=h.dtype)
    return torch.linalg.solve_triangular(
        torch.linalg.cholesky(covariance), centred.t(), upper=False
    ).t()


@register("image")
class BatchNorm2d(nn.BatchNorm2d):
    """Batch norm of images."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h)


@register("image")
class InstanceNorm(nn.InstanceNorm2d):
    """Instance norm with running statistics, which are means over the batch."""

    def __init__(self) -> None:
        super().__init__(WIDTH, affine=True, track_running_stats=True)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h)


@register("image")
class PlainInstanceNorm(nn.InstanceNorm2d):
    """Instance norm without state."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h)


@register("image")
class GroupNorm(nn.GroupNorm):
    """Group norm, which is row by row."""

    def __init__(self) -> None:
        super().__init__(3, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h)


@register("image")
def norm_over_batch_and_pixels(h: Tensor) -> Tensor:
    return (h - h.mean((0, 2, 3), keepdim=True)) / (h.std((0, 2, 3), keepdim=True) + 0.1)


@register("image")
def rows_as_channels(h: Tensor) -> Tensor:
    """`group_norm` of images stacked as channels of one."""
    n = h.shape[0]
    stacked = h.reshape(1, n * WIDTH, *h.shape[2:])
    return F.group_norm(stacked, n * 2).reshape(h.shape)


@register("sequence")
class BatchNormOverTokens(nn.BatchNorm1d):
    """Batch norm of tokens, features moved to dim 1 and back."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h.transpose(1, 2)).transpose(1, 2)


@register("sequence")
class LayerNorm(nn.LayerNorm):
    """Layer norm, which is row by row."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h)
