"""Train with large batches: LAMB, a rate scaled with the batch, and warm-up.

torchrun --nproc-per-node 2 examples/large_batch.py
"""

import argparse

import torch
from pytorch_optimizer import Lamb
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import autopar

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--rows", type=int, default=4096)
args = parser.parse_args()

torch.manual_seed(0)
width, classes = 32, 8
model = nn.Sequential(nn.Linear(width, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, classes))


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(args.rows, width)
    return x, x[:, :classes].argmax(1)


model = autopar.compile(model, example_inputs=batch(), loss_fn=F.cross_entropy, strategy="zero3")

# LAMB needs the norms of whole matrices, which ZeRO divides.
rate = 1e-2 * (args.rows / 256) ** 0.5  # square-root scaling from 256 rows
optimizer = model.whole_optimizer(
    lambda named: Lamb([parameter for _, parameter in named], lr=rate, weight_decay=0.01)
)
warmup = max(1, args.steps // 10)
parts = [
    LinearLR(optimizer, 0.01, total_iters=warmup),
    CosineAnnealingLR(optimizer, args.steps - warmup),
]
scheduler = SequentialLR(optimizer, parts, milestones=[warmup])

for step in range(1, args.steps + 1):
    loss = model(*batch())
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if step % 10 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}, rate {scheduler.get_last_lr()[0]:.2e}")
dist.destroy_process_group()
