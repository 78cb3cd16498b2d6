"""Rows picked and written by index."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.truth.registry import WIDTH, define_all, register


def _wide(index: Tensor) -> Tensor:
    """An index of rows for every feature."""
    return index[:, None].expand(-1, WIDTH)


define_all(
    "rows",
    {
        "reversed_mixup": lambda h: 0.7 * h + 0.3 * h.flip(0),
        "mixup": lambda h, permutation, mixing: torch.lerp(h[permutation], h, mixing[:, None]),
        "reversed_by_arange": lambda h: h + 0.3 * h[torch.arange(h.shape[0] - 1, -1, -1)],
        "picked": lambda h, permutation: torch.index_select(h, 0, permutation) * 0.5 + h,
        "gathered": lambda h, permutation: h + 0.4 * h.gather(0, _wide(permutation)),
        "taken_along": lambda h: h + 0.2 * torch.take_along_dim(h, h.detach().argsort(0), 0),
        "scattered_rows": lambda h, permutation: (
            h + 0.5 * torch.zeros_like(h).scatter(0, _wide(permutation), h)
        ),
        "scatter_added": lambda h, edges: torch.scatter_add(h, 0, _wide(edges[:, 0]), h.sin()),
        "copied_rows": lambda h, permutation: (
            0.5 * h + torch.zeros_like(h).index_copy(0, permutation, h.tanh())
        ),
        "first_row_as_reference": lambda h: h - 0.5 * h[0] + 0.1 * h[-1:],
        "triangle": lambda h: h + 0.3 * torch.tril(torch.tanh(h @ h.t())) @ h / h.shape[0],
        "scattered_slices": lambda h: torch.slice_scatter(h, h[-2:] * 0.5, 0, 0, 2) + 0.1 * h,
        "selected_row": lambda h: torch.select_scatter(h, h.mean(0), 0, 1) + 0.3 * h.select(0, 2),
        "filled_rows": lambda h: h.index_fill(0, torch.tensor([0, 3]), 0.5) * h,
        "reversed_both_dims": lambda h: h + 0.3 * torch.flip(h, (0, 1)),
        "looked_up_by_row": lambda h, permutation: h + 0.4 * F.embedding(permutation, h),
        "bags_of_rows": lambda h, edges: h + 0.4 * F.embedding_bag(edges, h, mode="mean"),
        "index_list": lambda h: h + 0.5 * h[[(3 * i + 1) % len(h) for i in range(len(h))]],
    },
)


@register("rows", sized=True, order=lambda rows: torch.randperm(rows))
def FixedPermutation(m, h: Tensor) -> Tensor:
    return h + 0.5 * h[m.order]


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
def put_rows(h: Tensor) -> Tensor:
    """Replace the first and third row."""
    index = torch.tensor([0, 2])
    return h.index_put((index,), h[index] * 0.5 + 1.0)


@register("rows")
def written_in_place(h: Tensor) -> Tensor:
    """Overwrite a row by the mean of the batch."""
    out = h.clone()
    out[1] = h.mean(0)
    out[-1] += 0.5
    return out


@register("rows")
def masked_in_place(h: Tensor, keep: Tensor) -> Tensor:
    """Zero rows in place, then add the mean of the rest."""
    out = h.clone()
    out.masked_fill_(~keep[:, None], 0.0)
    return out + 0.5 * out.mean(0) + 0.1 * h


@register("rows")
def pair_masked(h: Tensor, pair_mask: Tensor) -> Tensor:
    """Attention over the batch under a mask of pairs."""
    scores = (h @ h.t() / WIDTH**0.5).masked_fill(~pair_mask, float("-inf"))
    return h + scores.softmax(-1) @ h
