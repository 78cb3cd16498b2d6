"""Pretrain a 7B llama: float32 masters, bf16 compute, clipping, a schedule, checkpoints.

autopar plan examples/pretrain_7b.py --cluster dgx-h100 --nodes 2
torchrun --nnodes 2 --nproc-per-node 8 ... examples/pretrain_7b.py --tokens tokens.bin
torchrun --nproc-per-node 2 examples/pretrain_7b.py --size tiny --steps 20 --rows 8 --length 32

The file has tokens as unsigned 16-bit integers; without one, tokens are random. A second run
resumes from the last checkpoint.
"""

import argparse
import math
import sys

import numpy as np
import torch
from plan_llama import SIZES, Llama, Size
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import autopar

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--size", choices=[*SIZES, "tiny"], default="7b")
parser.add_argument("--rows", type=int, default=256, help="rows of the global batch")
parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
parser.add_argument("--steps", type=int, default=10_000)
parser.add_argument("--tokens", help="file of tokens")
parser.add_argument("--strategy", default="auto", help="or zero3, fastest, ...")
parser.add_argument("--out", default="runs/7b", help="folder of checkpoints, shared by all nodes")


class Batches:
    """Global batches of tokens and of the tokens that follow them, the same on every rank."""

    def __init__(self, args: argparse.Namespace, vocabulary: int) -> None:
        self.shape, self.vocabulary = (args.rows, args.length + 1), vocabulary
        self.file = np.memmap(args.tokens, np.uint16, "r") if args.tokens else None

    def __len__(self) -> int:
        return 1_000_000 if self.file is None else len(self.file) // math.prod(self.shape)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.file is None:
            draw = torch.Generator().manual_seed(index)
            tokens = torch.randint(self.vocabulary, self.shape, generator=draw)
        else:
            count = math.prod(self.shape)
            part = self.file[index * count : (index + 1) * count]
            tokens = torch.from_numpy(part.astype(np.int64)).view(self.shape)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make(args: argparse.Namespace | None = None) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the model on the meta device, and a batch of its shape; `autopar plan` calls this."""
    args = args or parser.parse_args(sys.argv[1:])
    size = {**SIZES, "tiny": Size(64, 128, 2, 4, 2, vocabulary=256)}[args.size]
    with torch.device("meta"):
        tokens = torch.zeros(args.rows, args.length, dtype=torch.long)
        return Llama(size), (tokens, tokens)


def main() -> None:
    """Train."""
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model, _ = make(args)
    batches = Batches(args, model.token.num_embeddings)
    example = tuple(part.to(device) for part in batches[0])
    model = autopar.compile(
        model,
        example_inputs=example,
        strategy=args.strategy,
        precision="bf16",
        device=device,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = max(1, args.steps // 50)
    parts = [
        LinearLR(optimizer, 1 / warmup, total_iters=warmup),
        CosineAnnealingLR(optimizer, args.steps - warmup, eta_min=3e-5),
    ]
    scheduler = SequentialLR(optimizer, parts, milestones=[warmup])
    checkpointer = autopar.Checkpointer(
        args.out, model, optimizer, scheduler=scheduler, every=500, keep=2
    )
    for step, index in checkpointer.steps(range(len(batches)), total=args.steps):
        loss = model(*(part.to(device) for part in batches[index]))
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
