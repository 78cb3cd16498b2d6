"""Rows picked and written by index; orders, extremes and cumulative reductions along the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.truth.registry import WIDTH, define_all, register


def _wide(index: Tensor) -> Tensor:
    return index[:, None].expand(-1, WIDTH)


define_all(
    "rows",
    {
        "mixup": lambda h, permutation, mixing: torch.lerp(h[permutation], h, mixing[:, None]),
        "reversed_by_arange": lambda h: h + 0.3 * h[torch.arange(h.shape[0] - 1, -1, -1)],
        "gathered": lambda h, permutation: h + 0.4 * h.gather(0, _wide(permutation)),
        "taken_along": lambda h: h + 0.2 * torch.take_along_dim(h, h.detach().argsort(0), 0),
        "scatter_added": lambda h, edges: torch.scatter_add(h, 0, _wide(edges[:, 0]), h.sin()),
        "copied_rows": lambda h, permutation: (
            0.5 * h + torch.zeros_like(h).index_copy(0, permutation, h.tanh())
        ),
        "first_row_as_reference": lambda h: h - 0.5 * h[0] + 0.1 * h[-1:],
        "triangle": lambda h: h + 0.3 * torch.tril(torch.tanh(h @ h.t())) @ h / h.shape[0],
        "scattered_slices": lambda h: torch.slice_scatter(h, h[-2:] * 0.5, 0, 0, 2) + 0.1 * h,
        "selected_row": lambda h: torch.select_scatter(h, h.mean(0), 0, 1) + 0.3 * h.select(0, 2),
        "filled_rows": lambda h: h.index_fill(0, torch.tensor([0, 3]), 0.5) * h,
        "looked_up_by_row": lambda h, permutation: h + 0.4 * F.embedding(permutation, h),
        "bags_of_rows": lambda h, edges: h + 0.4 * F.embedding_bag(edges, h, mode="mean"),
        "index_list": lambda h: h + 0.5 * h[[(3 * i + 1) % len(h) for i in range(len(h))]],
    },
)


define_all(
    "rows",
    {
        "sorted_rows": lambda h: h + 0.5 * h.sort(0).values,
        "top_rows": lambda h: h + 0.5 * h.topk(2, dim=0).values.mean(0),
        "median_centred": lambda h: h - h.median(0).values,
        "third_smallest": lambda h: h - 0.5 * h.kthvalue(3, dim=0).values,
        "quantile_centred": lambda h: h - h.quantile(0.25, dim=0),
        "scaled_by_max": lambda h: h / (1 + h.abs().max()),
        "largest_norm": lambda h: h + h / (1 + h.norm(dim=1).max()),
        "cumulative_sum": lambda h: h + 0.2 * h.cumsum(0),
        "cumulative_product": lambda h: h + 0.2 * torch.sigmoid(h).add(0.3).cumprod(0),
        "cumulative_max": lambda h: h + 0.3 * h.cummax(0).values,
        "cumulative_min": lambda h: h + 0.3 * h.cummin(0).values,
        "cumulative_logsumexp": lambda h: h + 0.3 * h.logcumsumexp(0),
        "softmax_over_rows": lambda h: h + h.shape[0] * h.softmax(0),
        "log_softmax_over_rows": lambda h: h - 0.2 * h.log_softmax(0),
        "logsumexp_over_rows": lambda h: h - 0.3 * h.logsumexp(0),
        "product_over_rows": lambda h: h + 0.3 * torch.sigmoid(h).add(0.4).prod(0),
    },
)


@register("rows")
def edges_into_rows(h: Tensor, edges: Tensor) -> Tensor:
    """A graph layer: messages along an edge list."""
    source, target = edges.unbind(1)
    return h + torch.zeros_like(h).index_add(0, target, h[source].tanh())


@register("rows")
def reduced_by_index(h: Tensor, edges: Tensor) -> Tensor:
    source, target = edges.unbind(1)
    return h + 0.5 * torch.zeros_like(h).index_reduce(0, target, h[source], "mean")


@register("rows")
def written_in_place(h: Tensor) -> Tensor:
    out = h.clone()
    out[1] = h.mean(0)
    out[-1] += 0.5
    return out


@register("rows")
def pair_masked(h: Tensor, pair_mask: Tensor) -> Tensor:
    scores = (h @ h.t() / WIDTH**0.5).masked_fill(~pair_mask, float("-inf"))
    return h + scores.softmax(-1) @ h
