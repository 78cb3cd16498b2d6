"""Modules that the models of `tests/harness/models.py` consist of.

`AUTOPAR_TEST_SCALE=8` makes them all that many times wider and longer, for benchmarks whose steps
must take longer than the machine's noise.
"""

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SCALE = int(os.environ.get("AUTOPAR_TEST_SCALE", "1"))
VOCAB, SEQ, WIDTH, HEADS = 67 * SCALE, 12 * SCALE, 32 * SCALE, 4
CLASSES, IMAGE = 10, (3, 12 * SCALE, 12 * SCALE)
IGNORED = -100


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def token_ids(rows: int, gen: torch.Generator, seq: int = SEQ) -> Tensor:
    return torch.randint(VOCAB, (rows, seq), generator=gen)


def ragged_mask(rows: int, gen: torch.Generator, seq: int = SEQ) -> Tensor:
    """(rows, seq) of bool: each row begins with its own number of True, at least one."""
    lengths = torch.randint(1, seq + 1, (rows, 1), generator=gen)
    return torch.arange(seq) < lengths


def split_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Attention with one fused projection for query, key and value."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q, k, v = map(split_heads, self.qkv(x).chunk(3, dim=-1))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=p, is_causal=causal)
        return self.out(merge_heads(y))


class CrossAttention(nn.Module):
    """Queries from the decoder, keys and values from the encoder's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        k, v = map(split_heads, self.key_value(memory).chunk(2, dim=-1))
        y = F.scaled_dot_product_attention(split_heads(self.query(x)), k, v, mask)
        return self.out(merge_heads(y))


def feed_forward(dropout: float = 0.0) -> nn.Sequential:
    up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    return nn.Sequential(up, nn.GELU(), down, nn.Dropout(dropout))


class Embedding(nn.Module):
    """Tokens and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(SEQ, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the tokens that are not ignored."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
