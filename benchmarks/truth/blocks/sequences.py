"""Blocks of sequences: attention, masks by length, recurrence, batch and time as one dim."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import WIDTH, define_all, linear, register


def _inside(h: Tensor, lengths: Tensor) -> Tensor:
    """A mask of the tokens of each row that are not padding."""
    return torch.arange(h.shape[1]) < lengths[:, None]


define_all(
    "sequence_pool",
    {
        "mean_over_time": lambda h: h.mean(1),
        "last_token": lambda h, lengths: h[torch.arange(h.shape[0]), lengths - 1],
        "mean_by_lengths": lambda h, lengths: (
            torch.einsum("btd,bt->bd", h, _inside(h, lengths).to(h.dtype)) / lengths[:, None]
        ),
        "time_major_max": lambda h: h.permute(1, 0, 2).amax(0),
    },
)
define_all("sequence", {"token_shift": lambda h: h + 0.5 * F.pad(h, (0, 0, 1, -1))}, plain=True)
define_all(
    "sequence",
    {
        "batch_and_time_flattened": lambda h: h + 0.3 * h.flatten(0, 1).roll(1, 0).view_as(h),
        "means_of_positions": lambda h: h - 0.5 * h.mean(0, keepdim=True),
    },
)


@register("sequence", plain=True, qkv=linear(WIDTH, 3 * WIDTH), out=linear())
def SelfAttention(m, h: Tensor) -> Tensor:
    n, t, _ = h.shape
    q, k, v = m.qkv(h).view(n, t, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return h + m.out(mixed.transpose(1, 2).reshape(n, t, WIDTH))


@register("sequence", attention=lambda: nn.MultiheadAttention(WIDTH, 2))
def AcrossTheBatch(m, h: Tensor) -> Tensor:
    """`MultiheadAttention` that takes the batch for time, as inter-sample attention does."""
    return h + m.attention(h, h, h, need_weights=False)[0]


@register("sequence", attention=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True))
def PaddedAttention(m, h: Tensor, lengths: Tensor) -> Tensor:
    return h + m.attention(h, h, h, key_padding_mask=~_inside(h, lengths))[0]


@register("sequence", plain=True, layer=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0))
def EncoderLayer(m, h: Tensor) -> Tensor:
    return m.layer(h.transpose(0, 1)).transpose(0, 1)


@register("sequence")
def masked_by_lengths(h: Tensor, lengths: Tensor) -> Tensor:
    """Replace padding by the mean of all other tokens."""
    inside = _inside(h, lengths)[..., None]
    return torch.where(inside, h, (h * inside).sum((0, 1)) / inside.sum())


@register("sequence")
def sorted_by_lengths(h: Tensor, lengths: Tensor) -> Tensor:
    """Rows sorted by length, weighted, and put back, as around packed sequences."""
    order = lengths.argsort(descending=True, stable=True)
    weight = torch.linspace(1, 2, h.shape[0], dtype=h.dtype)[:, None, None]
    return h + 0.3 * (h[order] * weight)[order.argsort()]


@register("sequence", rnn=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))
def Lstm(m, h: Tensor) -> Tensor:
    return h + m.rnn(h)[0]


@register("rows", rnn=lambda: nn.LSTM(WIDTH, WIDTH))
def LstmOverRows(m, h: Tensor) -> Tensor:
    return h + m.rnn(h[:, None])[0][:, 0]
