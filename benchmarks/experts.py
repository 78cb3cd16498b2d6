"""A mixture of experts of Mixtral's sizes, for planning: experts have room for so many tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Form:
    """Sizes; by default those of 8x7B."""

    width: int = 4096
    inner: int = 14336
    layers: int = 32
    heads: int = 32
    groups: int = 8  # of heads that share keys and values
    experts: int = 8
    top: int = 2
    vocabulary: int = 32000
    slack: float = 1.25  # of the capacity of experts, over what evenly routed tokens need


class Attention(nn.Module):
    """Causal attention whose keys and values serve several heads each."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form, self.size = form, form.width // form.heads
        inner = form.groups * self.size
        self.q, self.out = (nn.Linear(form.width, form.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(form.width, inner, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        each = (layer(x).unflatten(-1, (-1, self.size)) for layer in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in each)
        share = self.form.heads // self.form.groups
        k, v = (t.repeat_interleave(share, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Each token goes to its best experts, as far as these have room (GShard, arXiv 2006.16668)."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.router = nn.Linear(form.width, form.experts, bias=False)
        shape = (form.experts, form.width, form.inner)
        self.gate, self.up = (nn.Parameter(torch.empty(shape)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(form.experts, form.inner, form.width))

    def forward(self, x: Tensor) -> Tensor:
        sent, weights = self.routes(x)
        given = torch.einsum("bsec,bsd->ebcd", sent, x)
        wide = F.silu(torch.einsum("ebcd,edh->ebch", given, self.gate))
        wide = wide * torch.einsum("ebcd,edh->ebch", given, self.up)
        made = torch.einsum("ebch,ehd->ebcd", wide, self.down)
        return torch.einsum("bsec,ebcd->bsd", weights, made)

    def routes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """To which place of which expert each token goes, and how much what comes back counts."""
        form, length = self.form, x.shape[1]
        room = int(form.slack * form.top * length / form.experts)
        shares = self.router(x).softmax(-1)
        best, chosen = shares.topk(form.top, dim=-1)
        taken = F.one_hot(chosen, form.experts).sum(2)
        place = (taken.cumsum(1) - 1) * taken
        places = F.one_hot(place.clamp(max=room - 1), room) * (taken * (place < room))[..., None]
        sent = places.to(x.dtype)
        return sent, sent * (shares / best.sum(-1, keepdim=True))[..., None]


class Block(nn.Module):
    """Attention and experts, each on the normalised stream."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(form.width), nn.RMSNorm(form.width)
        self.attention, self.experts = Attention(form), Experts(form)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.experts(self.norm2(x))


class Mixture(nn.Module):
    """Called with tokens and the tokens that follow them, it returns its mean loss."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.token = nn.Embedding(form.vocabulary, form.width)
        self.blocks = nn.ModuleList(Block(form) for _ in range(form.layers))
        self.norm = nn.RMSNorm(form.width)
        self.head = nn.Linear(form.width, form.vocabulary, bias=False)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), following.flatten())
