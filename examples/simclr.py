"""Train SimCLR: every row is compared with all rows of the global batch, as on one device.

DistributedDataParallel would compare each rank's rows alone, and train to other numbers.

torchrun --nproc-per-node 2 examples/simclr.py
"""

import argparse

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

import autopar

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--rows", type=int, default=128)
args = parser.parse_args()


class SimCLR(nn.Module):
    """An encoder, a projection, and the loss over two views of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.projection = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        z, w = (F.normalize(self.projection(self.encoder(view))) for view in (one, other))
        logits = z @ w.T / 0.1  # all rows against all rows
        own = torch.arange(len(z), device=z.device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def views(seed: int) -> tuple[Tensor, Tensor]:
    """Two noisy views of the same images, the same on all ranks; augment your own instead."""
    draw = torch.Generator().manual_seed(seed)
    images, one, other = torch.randn(3, args.rows, 3, 16, 16, generator=draw)
    return images + one, images + other


torch.manual_seed(0)
model = autopar.compile(SimCLR(), example_inputs=views(0), strategy="ddp")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(1, args.steps + 1):
    loss = model(*views(step))  # each rank computes its part of the rows
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
