"""Train a mixture of experts; ranks of the axis "ep" share its experts.

torchrun --nproc-per-node 2 examples/mixture.py
"""

import argparse

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

import autopar

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--experts", type=int, default=8)
args = parser.parse_args()


class Experts(nn.Module):
    """Two experts a token, chosen by a router; every expert computes all tokens."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.router(x).softmax(-1)
        weights, chosen = chances.topk(2)
        sent = F.one_hot(chosen, chances.shape[-1]).to(x.dtype)  # rows, tokens, 2, experts
        combine = (weights[..., None] * sent).sum(-2)
        hidden = F.gelu(torch.einsum("btw,ewh->bteh", x, self.up))
        y = torch.einsum("bteh,ehw,bte->btw", hidden, self.down, combine)
        # Load balance of the Switch Transformer: means over the whole batch, on any mesh.
        balance = len(self.up) * (sent[:, :, 0].mean((0, 1)) * chances.mean((0, 1))).sum()
        return x + y, balance


class Mixture(nn.Module):
    """Layers of experts that predict the next token."""

    def __init__(self, experts: int, vocabulary: int = 64, width: int = 64) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Experts(width, experts) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x, penalty = self.token(tokens), 0.0
        for layer in self.layers:
            x, balance = layer(x)
            penalty = penalty + 0.01 * balance
        return F.cross_entropy(self.head(x).flatten(0, 1), following.flatten()) + penalty


def batch(rows: int = 16, length: int = 32) -> tuple[Tensor, Tensor]:
    """Sequences that count upwards by 1 to 4."""
    steps = torch.randint(1, 5, (rows, 1)) * torch.arange(length + 1)
    tokens = (torch.randint(64, (rows, 1)) + steps) % 64
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


torch.manual_seed(0)
strategy = autopar.Strategy(ep=2, zero=1)
model = autopar.compile(Mixture(args.experts), example_inputs=batch(), strategy=strategy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(1, args.steps + 1):
    loss = model(*batch())
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
