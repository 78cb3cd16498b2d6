"""Views and copies that regroup rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.truth.registry import WIDTH, register


@register("rows", divides=2)
def pairs_of_neighbours(h: Tensor) -> Tensor:
    """Every two neighbours exchange half of what they hold."""
    pairs = h.view(-1, 2, WIDTH)
    return (pairs + 0.5 * pairs.flip(1)).reshape(-1, WIDTH)


@register("rows", divides=2)
def halves(h: Tensor) -> Tensor:
    """The first half of the rows beside the second."""
    first, second = h.view(2, h.shape[0] // 2, WIDTH)
    return torch.cat([first + 0.5 * second, second - 0.5 * first])


@register("rows", divides=2)
def chunked(h: Tensor) -> Tensor:
    first, second = h.chunk(2, dim=0)
    return torch.cat([second, torch.tanh(first)], dim=0)


@register("rows", divides=2)
def stacked_halves(h: Tensor) -> Tensor:
    """Halves as a new dim, and interleaved back."""
    stacked = torch.stack(h.chunk(2), dim=1)
    return (stacked * stacked.mean(1, keepdim=True)).flatten(0, 1)


@register("rows")
def split_unevenly(h: Tensor) -> Tensor:
    first, rest = h.split([2, h.shape[0] - 2])
    return torch.cat([rest, 2.0 * first])


@register("rows", divides=2)
def interleaved(h: Tensor) -> Tensor:
    """Even rows before odd ones."""
    return torch.cat([h[0::2] + 0.3 * h[1::2], h[1::2]])


@register("rows")
def columns_of_the_batch(h: Tensor) -> Tensor:
    """The transpose, softmaxed along its last dim, which is the batch."""
    return h + torch.softmax(h.t(), dim=-1).t() * h.shape[0]


@register("rows", divides=2)
def folded_into_features(h: Tensor) -> Tensor:
    """Two rows as one of twice the width, through a matrix that mixes both."""
    wide = h.reshape(h.shape[0] // 2, 2 * WIDTH)
    mixed = wide + 0.1 * wide.flip(1)
    return mixed.reshape(h.shape[0], WIDTH)


@register("rows")
class Repeated(nn.Module):
    """Every row three times, through a layer, then the mean of the three."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.linspace(-1, 1, 3).repeat(2)[:3])

    def forward(self, h: Tensor) -> Tensor:
        copies = h.repeat_interleave(3, dim=0) + self.shift.repeat(h.shape[0])[:, None]
        return self.linear(copies).tanh().view(-1, 3, WIDTH).mean(1)


@register("rows")
def tiled(h: Tensor) -> Tensor:
    """The batch twice, one after the other, then both copies added."""
    twice = h.repeat(2, 1)
    twice = twice * torch.tanh(twice.mean(0))
    return twice[: h.shape[0]] + 0.5 * twice[h.shape[0] :]


@register("rows")
def expanded_pairs(h: Tensor) -> Tensor:
    """Every row beside every other, averaged over the others."""
    n = h.shape[0]
    both = torch.tanh(h[:, None].expand(n, n, WIDTH) - h[None].expand(n, n, WIDTH))
    return h + both.mean(1)


@register("rows")
def unbound(h: Tensor) -> Tensor:
    """A loop over rows in Python, each with the one before."""
    rows = list(h.unbind(0))
    out = [rows[0]]
    for row in rows[1:]:
        out.append(row + 0.5 * torch.tanh(out[-1]))
    return torch.stack(out)


@register("rows")
def padded(h: Tensor) -> Tensor:
    """One row of ones at the end, taken away at the front."""
    return nn.functional.pad(h, (0, 0, 0, 1), value=1.0)[1:] + 0.1 * h


@register("rows")
def gram(h: Tensor) -> Tensor:
    """Rows weighted by their inner products."""
    return h + torch.tanh(h @ h.t()) @ h / h.shape[0]


@register("rows")
def covariance(h: Tensor) -> Tensor:
    """Features weighted by their covariance over the batch."""
    centred = h - h.mean(0)
    return h + h @ (centred.t() @ centred / (h.shape[0] - 1)).tanh()


@register("rows")
def outer_einsum(h: Tensor) -> Tensor:
    return h + 0.1 * torch.einsum("bi,bj,cj->ci", h, h, h)


@register("rows")
def spectrum(h: Tensor) -> Tensor:
    """Power of the Fourier transform along the batch."""
    power = torch.fft.rfft(h, dim=0).abs().square()
    return h + 0.1 * torch.tanh(power.mean(0))


@register("rows")
def low_pass(h: Tensor) -> Tensor:
    """A filter in the frequencies of the batch."""
    spectrum = torch.fft.rfft(h, dim=0)
    return torch.fft.irfft(spectrum * 0.7, n=h.shape[0], dim=0)


@register("rows")
def distances(h: Tensor) -> Tensor:
    """Rows weighted by a kernel of their distances."""
    return h + torch.exp(-torch.cdist(h, h + 0.5)) @ h / h.shape[0]


@register("rows", divides=2)
def batched_products(h: Tensor) -> Tensor:
    """`baddbmm` of groups of rows."""
    groups = h.view(2, -1, WIDTH)
    scores = torch.baddbmm(groups.new_zeros(1), groups, groups.transpose(1, 2)).tanh()
    return h + torch.bmm(scores, groups).reshape(-1, WIDTH) / h.shape[0]
