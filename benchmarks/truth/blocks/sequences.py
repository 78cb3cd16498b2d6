"""Blocks of sequences: attention, masks by length, batch and time as one dim."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import STEPS_OF_TIME, WIDTH, register


@register("sequence")
class SelfAttention(nn.Module):
    """Attention over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        n, t, _ = h.shape
        q, k, v = self.qkv(h).view(n, t, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h + self.out(mixed.transpose(1, 2).reshape(n, t, WIDTH))


@register("sequence")
class AcrossTheBatch(nn.Module):
    """`MultiheadAttention` that takes the batch for time, as inter-sample attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.0)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.attention(h, h, h, need_weights=False)[0]


@register("sequence")
class EncoderLayer(nn.Module):
    """A layer of torch's transformer, time-major."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h.transpose(0, 1)).transpose(0, 1)


@register("sequence")
def masked_by_lengths(h: Tensor, lengths: Tensor) -> Tensor:
    """Tokens behind the end replaced by the mean of all that are not."""
    inside = (torch.arange(h.shape[1]) < lengths[:, None])[..., None]
    mean = (h * inside).sum((0, 1)) / inside.sum()
    return torch.where(inside, h, mean)


@register("sequence")
def batch_and_time_flattened(h: Tensor) -> Tensor:
    """Tokens of the whole batch in one dim, each with the one before."""
    flat = h.flatten(0, 1)
    return (flat + 0.3 * flat.roll(1, 0)).view_as(h)


@register("sequence")
def time_major_softmax(h: Tensor) -> Tensor:
    """Time-major, then a softmax over dim 1, which is the batch."""
    major = h.transpose(0, 1).contiguous()
    return h + (major * major.softmax(1)).transpose(0, 1)


@register("sequence")
def batch_and_time_swapped(h: Tensor) -> Tensor:
    """The same numbers seen as time-major by a view that is no transpose."""
    n, t, d = h.shape
    return h + 0.3 * h.reshape(t, n, d).tanh().transpose(0, 1)


@register("sequence")
def token_shift(h: Tensor) -> Tensor:
    return h + 0.5 * F.pad(h, (0, 0, 1, -1))


@register("sequence")
def means_of_positions(h: Tensor) -> Tensor:
    """Centred by the mean of the same position over the batch."""
    return h - 0.5 * h.mean(0, keepdim=True)


@register("sequence")
class TokenMixer(nn.Module):
    """A learnt matrix over time."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(STEPS_OF_TIME, STEPS_OF_TIME)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.mix(h.transpose(1, 2)).transpose(1, 2)


@register("sequence")
class CrossAttention(nn.Module):
    """Learnt queries that all rows share attend to the tokens of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        tokens = h.reshape(-1, WIDTH)
        summary = torch.softmax(self.queries @ tokens.t(), -1) @ tokens
        return h + summary.mean(0)


@register("sequence_pool")
def mean_over_time(h: Tensor) -> Tensor:
    return h.mean(1)


@register("sequence_pool")
def last_token(h: Tensor, lengths: Tensor) -> Tensor:
    return h[torch.arange(h.shape[0]), lengths - 1]


@register("sequence_pool")
def mean_by_lengths(h: Tensor, lengths: Tensor) -> Tensor:
    inside = (torch.arange(h.shape[1]) < lengths[:, None]).to(h.dtype)
    return torch.einsum("btd,bt->bd", h, inside) / lengths[:, None]


@register("sequence_pool")
def time_major_max(h: Tensor) -> Tensor:
    return h.permute(1, 0, 2).amax(0)


@register("sequence")
class CausalEncoder(nn.Module):
    """Two layers of torch's transformer under a causal mask, batch first."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, h: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(h.shape[1], dtype=h.dtype)
        return self.encoder(h, mask=mask)


@register("sequence")
class PaddedAttention(nn.Module):
    """Attention under a mask of each row's padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, h: Tensor, lengths: Tensor) -> Tensor:
        padding = torch.arange(h.shape[1]) >= lengths[:, None]
        return h + self.attention(h, h, h, key_padding_mask=padding)[0]


@register("sequence")
class ConformerConvolution(nn.Module):
    """A gated depthwise convolution over time with batch norm, as in a Conformer."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depth = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        gated = F.glu(self.point(h.transpose(1, 2)), dim=1)
        return h + F.silu(self.norm(self.depth(gated))).transpose(1, 2)


@register("sequence")
class TiedDecoder(nn.Module):
    """Tokens softmaxed over a table, and looked up in it again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return h + (h @ self.table.t()).softmax(-1) @ self.table


@register("sequence")
class ExpertsOfTokens(nn.Module):
    """Tokens of the batch routed to experts that take so many, first come, first served."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.Parameter(0.4 * torch.randn(3, WIDTH, WIDTH))

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        tokens = h.reshape(-1, WIDTH)
        gate = self.router(tokens).softmax(-1)
        value, chosen = gate.max(-1)
        hot = F.one_hot(chosen, 3)
        place = ((hot.cumsum(0) - 1) * hot).sum(-1)
        capacity = tokens.shape[0] // 2
        taken = (place < capacity).to(h.dtype) * value
        out = torch.einsum("nd,ndf->nf", tokens, self.experts[chosen]) * taken[:, None]
        balance = 3 * (hot.to(h.dtype).mean(0) * gate.mean(0)).sum()
        return (tokens + out).view_as(h), 0.1 * balance


@register("sequence")
class LinearRecurrence(nn.Module):
    """A diagonal state space in a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.zeros(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        keep, state, out = torch.sigmoid(self.decay), torch.zeros_like(h[:, 0]), []
        for x in self.inner(h).unbind(1):
            state = keep * state + (1 - keep) * x
            out.append(state)
        return h + torch.stack(out, dim=1)


@register("sequence")
def reversed_by_lengths(h: Tensor, lengths: Tensor) -> Tensor:
    """Tokens of each row in reverse, padding left in place."""
    place = torch.arange(h.shape[1])
    back = (lengths[:, None] - 1 - place) % h.shape[1]
    index = torch.where(place < lengths[:, None], back, place)
    return h + 0.5 * h.gather(1, index[..., None].expand_as(h))


@register("sequence")
def shared_across_rows(h: Tensor) -> Tensor:
    """The last token of each row goes to the next row's first, as in packed training."""
    carried = torch.cat([torch.zeros_like(h[:1, -1:]), h[:-1, -1:]])
    return torch.cat([h[:, :1] + 0.5 * carried, h[:, 1:]], dim=1)


@register("sequence")
def sorted_by_lengths(h: Tensor, lengths: Tensor) -> Tensor:
    """Rows sorted by length, shifted, and put back, as around packed sequences."""
    order = lengths.argsort(descending=True, stable=True)
    back = order.argsort()
    ranked = h[order]
    return h + 0.3 * (ranked * torch.linspace(1, 2, h.shape[0], dtype=h.dtype)[:, None, None])[back]


@register("sequence", divides=2)
def dialogue_turns(h: Tensor) -> Tensor:
    """Every two rows are one longer sequence."""
    long = h.reshape(-1, 2 * h.shape[1], WIDTH)
    return (long + 0.3 * long.cumsum(1)).reshape(h.shape)
