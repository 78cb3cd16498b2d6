"""Linear algebra in which the batch is a dim of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.truth.registry import WIDTH, register


def _identity(h: Tensor) -> Tensor:
    return torch.eye(h.shape[0], dtype=h.dtype)


@register("rows")
def ridge_fitted(h: Tensor, scores: Tensor) -> Tensor:
    """Scores fitted on the batch by ridge regression, as one more signal."""
    gram = h.t() @ h + torch.eye(WIDTH, dtype=h.dtype)
    weight = torch.linalg.solve(gram, h.t() @ scores)
    return h + (h @ weight)[:, None].tanh()


@register("rows")
def kernel_smoothed(h: Tensor) -> Tensor:
    """A kernel ridge regression of the rows on themselves."""
    kernel = torch.exp(-(h[:, None] - h[None]).square().sum(-1) / 4)
    return h + torch.linalg.solve(kernel + _identity(h), kernel @ h)


@register("rows")
def inverse_weighted(h: Tensor) -> Tensor:
    return h @ torch.linalg.inv(torch.eye(WIDTH, dtype=h.dtype) + h.t() @ h / h.shape[0])


@register("rows")
def gaussian_process(h: Tensor) -> Tensor:
    """Rows mixed by the Cholesky factor of a kernel of their positions."""
    place = torch.arange(h.shape[0], dtype=h.dtype)
    kernel = torch.exp(-(place[:, None] - place[None]).square() / 4) + 0.5 * _identity(h)
    return torch.linalg.cholesky(kernel) @ h


@register("rows")
def graph_propagated(h: Tensor, pair_mask: Tensor) -> Tensor:
    """Personalised page rank on a graph of the rows."""
    adjacency = pair_mask.to(h.dtype)
    walk = adjacency / adjacency.sum(1, keepdim=True)
    return torch.linalg.solve(_identity(h) - 0.5 * walk, h)


@register("rows")
def symmetric_walk(h: Tensor, pair_mask: Tensor) -> Tensor:
    """A graph convolution with symmetric norms, two hops."""
    adjacency = (pair_mask | pair_mask.t()).to(h.dtype)
    scale = adjacency.sum(1).rsqrt()
    walk = scale[:, None] * adjacency * scale[None]
    return h + torch.linalg.matrix_power(walk, 2) @ h


@register("rows")
def contracted(h: Tensor) -> Tensor:
    """`tensordot` over the batch."""
    return h + h @ torch.tensordot(h, h, dims=([0], [0])).tanh() / h.shape[0]


@register("rows")
def third_order(h: Tensor) -> Tensor:
    """Three rows at once, in one einsum."""
    return h + 0.1 * torch.einsum("ai,bi,bj,cj->aj", h, h, h, h) / h.shape[0] ** 2


@register("rows")
def matrix_vector(h: Tensor, weights: Tensor) -> Tensor:
    """`addmv` with the transposed batch."""
    return h + torch.addmv(h.mean(0), h.t(), weights, alpha=0.2)


@register("rows")
def outer_of_inputs(h: Tensor, weights: Tensor, scores: Tensor) -> Tensor:
    """A matrix of two vectors of the batch."""
    return h + torch.outer(weights, scores).tanh() @ h / h.shape[0]


@register("rows")
def orthogonal_to_mean(h: Tensor) -> Tensor:
    """The part along the mean row taken away."""
    mean = h.mean(0)
    return h - (h @ mean)[:, None] * mean / (mean @ mean + 0.5)


@register("rows")
def power_iteration(h: Tensor) -> Tensor:
    """The first principal direction, by three products."""
    direction = torch.ones(WIDTH, dtype=h.dtype)
    for _ in range(3):
        direction = h.t() @ (h @ direction)
        direction = direction / (direction.norm() + 0.1)
    return h - 0.5 * torch.outer(h @ direction, direction)


@register("rows")
def newton_schulz(h: Tensor) -> Tensor:
    """Decorrelated by iterations, as in iterative normalisation."""
    centred = h - h.mean(0)
    sigma = centred.t() @ centred / h.shape[0] + 0.5 * torch.eye(WIDTH, dtype=h.dtype)
    trace = sigma.diagonal().sum()
    p = torch.eye(WIDTH, dtype=h.dtype)
    for _ in range(3):
        p = 1.5 * p - 0.5 * p @ p @ p @ (sigma / trace)
    return centred @ p / trace.sqrt()


@register("rows")
def trace_scaled(h: Tensor) -> Tensor:
    return h / (1 + torch.trace(h @ h.t()) / h.shape[0])


@register("rows")
class LearntAffinity(nn.Module):
    """A bilinear form of pairs of rows, softmaxed over the second."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(WIDTH, WIDTH, 1)

    def forward(self, h: Tensor) -> Tensor:
        n = h.shape[0]
        first = h.repeat_interleave(n, dim=0)
        second = h.repeat(n, 1)
        return h + self.form(first, second).view(n, n).softmax(1) @ h


@register("rows")
class PairNetwork(nn.Module):
    """A network of every pair of rows, summed over the second (deep sets, relation nets)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        n = h.shape[0]
        left = h[:, None].expand(n, n, WIDTH)
        pairs = torch.cat([left, left.transpose(0, 1)], dim=-1)
        return h + self.net(pairs.reshape(n * n, -1)).view(n, n, WIDTH).mean(1)


@register("rows")
class DeepSet(nn.Module):
    """The batch as a set: a sum of all rows through a layer, given back to each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        whole = self.inner(h).relu().sum(0, keepdim=True).expand(h.shape[0], -1)
        return self.outer(torch.cat([h, whole], dim=1))
