"""Orders, ranks, extremes and cumulative reductions along the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.truth.registry import define_all, register


def _scaled_to_range(h: Tensor) -> Tensor:
    low, high = h.amin(0), h.amax(0)
    return (h - low) / (high - low + 0.1)


define_all(
    "rows",
    {
        "sorted_rows": lambda h: h + 0.5 * h.sort(0).values,
        "sorted_by_score": lambda h: h[h.sum(1).argsort()] + 0.3 * h,
        "top_rows": lambda h: h + 0.5 * h.topk(2, dim=0).values.mean(0),
        "median_centred": lambda h: h - h.median(0).values,
        "third_smallest": lambda h: h - 0.5 * h.kthvalue(3, dim=0).values,
        "quantile_centred": lambda h: h - h.quantile(0.25, dim=0),
        "scaled_by_max": lambda h: h / (1 + h.abs().max()),
        "min_max_scaled": _scaled_to_range,
        "largest_norm": lambda h: h + h / (1 + h.norm(dim=1).max()),
        "row_of_largest_norm": lambda h: h + 0.5 * h[h.square().sum(1).argmax()],
        "cumulative_sum": lambda h: h + 0.2 * h.cumsum(0),
        "cumulative_product": lambda h: h + 0.2 * torch.sigmoid(h).add(0.3).cumprod(0),
        "cumulative_max": lambda h: h + 0.3 * h.cummax(0).values,
        "cumulative_min": lambda h: h + 0.3 * h.cummin(0).values,
        "cumulative_logsumexp": lambda h: h + 0.3 * h.logcumsumexp(0),
        "softmax_over_rows": lambda h: h + h.shape[0] * h.softmax(0),
        "log_softmax_over_rows": lambda h: h - 0.2 * h.log_softmax(0),
        "logsumexp_over_rows": lambda h: h - 0.3 * h.logsumexp(0),
        "product_over_rows": lambda h: h + 0.3 * torch.sigmoid(h).add(0.4).prod(0),
        "counted_positive": lambda h: h * (1 + (h > 0).sum(0).to(h.dtype) / h.shape[0]),
    },
)


@register("rows")
def ranks(h: Tensor) -> Tensor:
    """Ranks of rows as features."""
    rank = h.detach().argsort(0).argsort(0).to(h.dtype)
    return h * (1 + rank / h.shape[0])
