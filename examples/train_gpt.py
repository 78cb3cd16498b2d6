"""Train a byte-level GPT on the source of Python's standard library.

autopar run examples/train_gpt.py --nproc 2 -- --steps 1000
torchrun --nproc-per-node 2 examples/train_gpt.py --strategy zero3
python examples/train_gpt.py

A second run resumes from the last checkpoint, also with other processes or another strategy.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.optim import AdamW

import autopar

CHECKPOINT_EVERY = 100  # steps


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each on the normalised stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each: rows, heads, positions, width of a head
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder over the 256 bytes with 1.9 M parameters and tied embeddings."""

    def __init__(self, seq: int, width: int = 192, heads: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())


def own_device() -> torch.device:
    """Return this process's GPU, or the CPU where processes outnumber GPUs."""
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def read_stdlib(limit: int = 10_000_000) -> tuple[Tensor, Tensor]:
    """Return `limit` bytes of source for training, and one file in ten for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    paths = sorted(path for path in root.rglob("*.py") if left_out.isdisjoint(path.parts))
    train, held_out = bytearray(), bytearray()
    for number, path in enumerate(paths):
        if len(train) < limit:
            (held_out if number % 10 == 9 else train).extend(path.read_bytes())
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def batch(text: Tensor, rows: int, seq: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return random rows of text and their next bytes, the same on every process."""
    rng = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - seq, (rows, 1), generator=rng)
    window = text[(starts + torch.arange(seq + 1)).to(text.device)].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def unigram_loss(train: Tensor, held_out: Tensor) -> float:
    """Return the loss of a model of byte frequencies alone, in nats per byte."""
    counts = torch.bincount(train, minlength=256).double() + 1
    frequency = torch.bincount(held_out, minlength=256).double() / len(held_out)
    return -(frequency * (counts / counts.sum()).log()).sum().item()


@torch.no_grad()
def validation_loss(model: nn.Module, held_out: Tensor, rows: int, seq: int) -> float:
    """Return the mean loss over 16 batches of held-out text, in nats per byte."""
    losses = [model(*batch(held_out, rows, seq, seed)).item() for seed in range(16)]
    return sum(losses) / len(losses)


@torch.no_grad()
def sample(model: autopar.DistributedModule, count: int, seq: int, seed: int) -> str:
    """Continue a prompt by `count` bytes.

    The batch is the same row once for each process, so all have the same logits. With the same
    random numbers they draw the same next byte.
    """
    rng = torch.Generator().manual_seed(seed)
    text = list(b"def ")
    for _ in range(count):
        context = text[-seq:]
        padded = context + [0] * (seq - len(context))  # causal: padding has no effect
        row = torch.tensor(padded, device=own_device())
        logits = model(row.repeat(model.data_parallel_size, 1))[0, len(context) - 1].cpu()
        text += torch.multinomial((logits / 0.8).softmax(-1), 1, generator=rng).tolist()
    return bytes(text).decode(errors="replace")


def is_first() -> bool:
    """Whether this process prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with autopar.")
    parser.add_argument("--steps", type=int, default=500, help="total, resumed ones included")
    parser.add_argument("--strategy", default="auto", help="or ddp, zero1, zero2, zero3, fastest")
    parser.add_argument("--memory", type=int, help="memory limit of each process, in MiB")
    parser.add_argument("--batch", type=int, default=32, help="rows of the global batch")
    parser.add_argument("--seq", type=int, default=128, help="bytes in a row")
    parser.add_argument("--sample", type=int, default=300, help="bytes to generate at the end")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder of results")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train, measure, sample."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = own_device()
    text, held_out = (part.to(device) for part in read_stdlib())

    model = autopar.compile(
        GPT(args.seq).to(device),
        example_inputs=batch(text, args.batch, args.seq, seed=0),
        strategy=args.strategy,
        memory=args.memory and args.memory << 20,
    )
    optimizer = AdamW(model.parameters(), lr=2e-3)

    console = Console(quiet=not is_first(), highlight=False)
    if is_first():
        print(model.plan)
        args.out.mkdir(parents=True, exist_ok=True)
        model.plan.save(args.out / "plan.json")
        model.plan.report(args.out / "plan.html")
    checkpointer = autopar.Checkpointer(args.out, model, optimizer, every=CHECKPOINT_EVERY, keep=1)
    if done := checkpointer.resume():
        console.print(f"resumed from step {done} in {args.out}")

    figures = "loss {task.fields[loss]:.3f}", "{task.fields[rate]:,.0f} tokens/s"
    columns = BarColumn(), MofNCompleteColumn(), *figures, TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("train", total=args.steps, completed=done, loss=math.nan, rate=0)
        started = time.perf_counter()
        seeds = range(1_000_000 * args.seed + 1, 1_000_000 * args.seed + 1 + args.steps)
        for step, seed in checkpointer.steps(seeds, total=args.steps):
            x, y = batch(text, args.batch, args.seq, seed)

            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

            rate = (step - done) * y.numel() / (time.perf_counter() - started)
            progress.update(bar, completed=step, loss=loss.item(), rate=rate)
            if step % CHECKPOINT_EVERY == 0 or step == args.steps:
                console.print(f"step {step}: loss {loss.item():.3f}, {rate:,.0f} tokens/s")

    model.eval()
    validation = validation_loss(model, held_out, args.batch, args.seq)
    for name, nats in ("validation", validation), ("unigram model", unigram_loss(text, held_out)):
        console.print(f"{name}: {nats:.3f} nats/byte, {nats / math.log(2):.3f} bits/byte")
    if args.sample:
        console.print(sample(model, args.sample, args.seq, args.seed), markup=False)


if __name__ == "__main__":
    main()
