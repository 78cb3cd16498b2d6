"""Rows picked and written by index."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.truth.registry import WIDTH, register


@register("rows")
def reversed_mixup(h: Tensor) -> Tensor:
    return 0.7 * h + 0.3 * h.flip(0)


@register("rows")
def mixup(h: Tensor, permutation: Tensor, mixing: Tensor) -> Tensor:
    """Mixed with the rows of a permutation, as much as an input says."""
    return mixing[:, None] * h + (1 - mixing[:, None]) * h[permutation]


@register("rows", sized=True)
class FixedPermutation(nn.Module):
    """Mixed with a permutation in a buffer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(rows))

    def forward(self, h: Tensor) -> Tensor:
        return h + 0.5 * h[self.order]


@register("rows")
def reversed_by_arange(h: Tensor) -> Tensor:
    index = torch.arange(h.shape[0] - 1, -1, -1)
    return h + 0.3 * h[index]


@register("rows")
def picked(h: Tensor, permutation: Tensor) -> Tensor:
    return torch.index_select(h, 0, permutation) * 0.5 + h


@register("rows")
def gathered(h: Tensor, permutation: Tensor) -> Tensor:
    """`gather` along the batch."""
    index = permutation[:, None].expand(-1, WIDTH)
    return h + 0.4 * h.gather(0, index)


@register("rows")
def taken_along(h: Tensor) -> Tensor:
    return h + 0.2 * torch.take_along_dim(h, h.detach().argsort(0), 0)


@register("rows")
def edges_into_rows(h: Tensor, edges: Tensor) -> Tensor:
    """A graph layer: messages along an edge list."""
    source, target = edges.unbind(1)
    return h + torch.zeros_like(h).index_add(0, target, h[source].tanh())


@register("rows")
def scattered_rows(h: Tensor, permutation: Tensor) -> Tensor:
    index = permutation[:, None].expand_as(h)
    return h + 0.5 * torch.zeros_like(h).scatter(0, index, h)


@register("rows")
def scatter_added(h: Tensor, edges: Tensor) -> Tensor:
    index = edges[:, :1].expand_as(h)
    return torch.scatter_add(0.5 * h, 0, index, h.sin())


@register("rows")
def copied_rows(h: Tensor, permutation: Tensor) -> Tensor:
    return 0.5 * h + torch.zeros_like(h).index_copy(0, permutation, h.tanh())


@register("rows")
def put_rows(h: Tensor) -> Tensor:
    """The first and third row replaced."""
    index = torch.tensor([0, 2])
    return h.index_put((index,), h[index] * 0.5 + 1.0)


@register("rows")
def written_in_place(h: Tensor) -> Tensor:
    """A row overwritten by the mean of the batch."""
    out = h.clone()
    out[1] = h.mean(0)
    out[-1] += 0.5
    return out


@register("rows")
def first_row_as_reference(h: Tensor) -> Tensor:
    return h - 0.5 * h[0] + 0.1 * h[-1:]


@register("rows")
def pair_masked(h: Tensor, pair_mask: Tensor) -> Tensor:
    """Attention over the batch under a mask of pairs."""
    scores = (h @ h.t() / WIDTH**0.5).masked_fill(~pair_mask, float("-inf"))
    return h + scores.softmax(-1) @ h


@register("rows")
def kept_or_mean(h: Tensor, keep: Tensor) -> Tensor:
    """Masked rows replaced by the mean of those kept."""
    mean = (h * keep[:, None]).sum(0) / keep.sum()
    return torch.where(keep[:, None], h, mean)


@register("rows")
def triangle(h: Tensor) -> Tensor:
    """A causal mask over rows."""
    return h + 0.3 * torch.tril(torch.tanh(h @ h.t())) @ h / h.shape[0]


@register("rows")
def diagonal_shift(h: Tensor) -> Tensor:
    similar = torch.tanh(h @ h.t())
    return h + 0.3 * torch.diagonal(similar)[:, None] + 0.3 * similar.sum(1, keepdim=True)


@register("rows")
def strided_windows(h: Tensor) -> Tensor:
    """Overlapping windows of two rows by `as_strided`."""
    n = h.shape[0]
    windows = h.contiguous().as_strided((n - 1, 2, WIDTH), (WIDTH, WIDTH, 1))
    return torch.cat([windows.mean(1), h[-1:]])


@register("rows")
def reduced_by_index(h: Tensor, edges: Tensor) -> Tensor:
    """The mean of messages, by `index_reduce`."""
    source, target = edges.unbind(1)
    return h + 0.5 * torch.zeros_like(h).index_reduce(0, target, h[source], "mean")


@register("rows")
def scattered_slices(h: Tensor) -> Tensor:
    """The first two rows replaced by the last two."""
    return torch.slice_scatter(h, h[-2:] * 0.5, dim=0, start=0, end=2) + 0.1 * h


@register("rows")
def selected_row(h: Tensor) -> Tensor:
    return torch.select_scatter(h, h.mean(0), 0, 1) + 0.3 * h.select(0, 2)


@register("rows")
def filled_rows(h: Tensor) -> Tensor:
    return h.index_fill(0, torch.tensor([0, 3]), 0.5) * h


@register("rows")
def masked_in_place(h: Tensor, keep: Tensor) -> Tensor:
    """Rows zeroed in place, then the mean of what is left added."""
    out = h.clone()
    out.masked_fill_(~keep[:, None], 0.0)
    return out + 0.5 * out.mean(0) + 0.1 * h


@register("rows")
def turned_around(h: Tensor) -> Tensor:
    """Rows and features both in reverse."""
    return h + 0.3 * torch.flip(h, (0, 1))


@register("rows")
def split_into_three(h: Tensor) -> Tensor:
    """Uneven parts by `tensor_split`, in another order."""
    first, second, third = torch.tensor_split(h, 3)
    return torch.cat([third, first * 0.5, second])


@register("rows")
def looked_up_by_row(h: Tensor, permutation: Tensor) -> Tensor:
    """The batch as a table that `embedding` looks up."""
    return h + 0.4 * nn.functional.embedding(permutation, h)


@register("rows")
def bags_of_rows(h: Tensor, edges: Tensor) -> Tensor:
    """Means of the rows that each row names, by `embedding_bag`."""
    return h + 0.4 * nn.functional.embedding_bag(edges, h, mode="mean")


@register("rows")
def listed_in_python(h: Tensor) -> Tensor:
    """An index that is a list."""
    order = [(3 * i + 1) % h.shape[0] for i in range(h.shape[0])]
    return h + 0.5 * h[order]
