"""Orders, ranks and cumulative reductions along the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.truth.registry import register


@register("rows")
def sorted_rows(h: Tensor) -> Tensor:
    return h + 0.5 * h.sort(0).values


@register("rows")
def sorted_by_score(h: Tensor) -> Tensor:
    """Rows in the order of their sums."""
    return h[h.sum(1).argsort()] + 0.3 * h


@register("rows")
def ranks(h: Tensor) -> Tensor:
    """Ranks of rows as features."""
    rank = h.detach().argsort(0).argsort(0).to(h.dtype)
    return h * (1 + rank / h.shape[0])


@register("rows")
def top_rows(h: Tensor) -> Tensor:
    return h + 0.5 * h.topk(2, dim=0).values.mean(0)


@register("rows")
def median_centred(h: Tensor) -> Tensor:
    return h - h.median(0).values


@register("rows")
def third_smallest(h: Tensor) -> Tensor:
    return h - 0.5 * h.kthvalue(3, dim=0).values


@register("rows")
def scaled_by_max(h: Tensor) -> Tensor:
    return h / (1 + h.abs().max())


@register("rows")
def min_max_scaled(h: Tensor) -> Tensor:
    low, high = h.amin(0), h.amax(0)
    return (h - low) / (high - low + 0.1)


@register("rows")
def weighted_by_largest(h: Tensor) -> Tensor:
    """The row with the largest norm added to all."""
    return h + 0.5 * h[h.square().sum(1).argmax()]


@register("rows")
def quantile_centred(h: Tensor) -> Tensor:
    return h - h.quantile(0.25, dim=0)


@register("rows")
def summed_so_far(h: Tensor) -> Tensor:
    return h + 0.2 * h.cumsum(0)


@register("rows")
def multiplied_so_far(h: Tensor) -> Tensor:
    return h + 0.2 * torch.sigmoid(h).add(0.3).cumprod(0)


@register("rows")
def largest_so_far(h: Tensor) -> Tensor:
    return h + 0.3 * h.cummax(0).values


@register("rows")
def smallest_so_far(h: Tensor) -> Tensor:
    return h + 0.3 * h.cummin(0).values


@register("rows")
def log_summed_so_far(h: Tensor) -> Tensor:
    return h + 0.3 * h.logcumsumexp(0)


@register("rows")
def mean_so_far(h: Tensor) -> Tensor:
    count = torch.arange(1, h.shape[0] + 1, dtype=h.dtype)[:, None]
    return h - 0.5 * h.cumsum(0) / count


@register("rows")
def counted_below(h: Tensor) -> Tensor:
    """How many rows lie below, as a factor."""
    score = h.sum(1)
    below = (score[:, None] > score[None]).to(h.dtype).mean(1)
    return h * (1 + below[:, None])


@register("rows")
def softmax_over_rows(h: Tensor) -> Tensor:
    return h + h.shape[0] * h.softmax(0)


@register("rows")
def log_softmax_over_rows(h: Tensor) -> Tensor:
    return h - 0.2 * h.log_softmax(0)


@register("rows")
def logsumexp_over_rows(h: Tensor) -> Tensor:
    return h - 0.3 * h.logsumexp(0)


@register("rows")
def product_over_rows(h: Tensor) -> Tensor:
    return h + 0.3 * torch.sigmoid(h).add(0.4).prod(0)


@register("rows")
def counted_positive(h: Tensor) -> Tensor:
    """A factor from a count over the batch."""
    return h * (1 + (h > 0).sum(0).to(h.dtype) / h.shape[0])


@register("rows")
def largest_norm(h: Tensor) -> Tensor:
    return h + h / (1 + h.norm(dim=1).max())


@register("rows")
def clipped_by_batch(h: Tensor) -> Tensor:
    """Clamped to two thirds of the batch's largest value."""
    limit = 0.66 * h.detach().abs().amax()
    return torch.where(h.abs() < limit, h, limit * h.sign() + 0.1 * h)
