"""Train a byte-level GPT on the source of Python's standard library.

autopar run examples/train_gpt.py --nproc 2     # two processes; more steps: --steps 1000
torchrun --nproc-per-node 2 examples/train_gpt.py
python examples/train_gpt.py                     # one process

Run it again and it resumes from its last checkpoint, also with another --nproc or --strategy.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

import autopar

LEARNING_RATE = 2e-3
EVERY = 100  # steps between checkpoints


# The model: plain PyTorch, written for one device.


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each on a normalised residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each: batch, heads, positions, width of a head
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder over the 256 bytes; the embedding is tied to the output layer."""

    def __init__(self, seq: int, width: int = 192, heads: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the mean loss in nats per byte, or the logits where there are no targets."""
        h = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())


# The text: the same on every machine with the same Python.


def read_stdlib(limit: int = 10_000_000) -> tuple[Tensor, Tensor]:
    """Return up to `limit` bytes of source for training, and one file in ten for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    paths = sorted(p for p in root.rglob("*.py") if left_out.isdisjoint(p.parts))
    train, held_out = bytearray(), bytearray()
    for number, path in enumerate(paths):
        if len(train) < limit:
            (held_out if number % 10 == 9 else train).extend(path.read_bytes())
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def batches(text: Tensor, rows: int, seq: int, seed: int, start: int = 0) -> Iterator[list[Tensor]]:
    """Yield (x, y) for step `start` onwards; a step's batch depends on nothing but its number."""
    for step in range(start, 1 << 40):
        rng = torch.Generator().manual_seed(1_000_003 * seed + step)
        at = torch.randint(len(text) - seq, (rows, 1), generator=rng) + torch.arange(seq + 1)
        window = text[at].long()
        yield [window[:, :-1], window[:, 1:]]


def unigram_loss(train: Tensor, held_out: Tensor) -> float:
    """Return the loss in nats per byte of knowing only how frequent each byte is."""
    counts = torch.bincount(train, minlength=256).double() + 1
    frequency = torch.bincount(held_out, minlength=256).double() / len(held_out)
    return -(frequency * (counts / counts.sum()).log()).sum().item()


@torch.no_grad()
def validate(model: nn.Module, held_out: Tensor, rows: int, seq: int, count: int = 16) -> float:
    """Return the mean loss in nats per byte over `count` fixed validation batches."""
    model.eval()
    data = batches(held_out, rows, seq, seed=0)
    loss = sum(model(*next(data)).item() for _ in range(count)) / count
    model.train()
    return loss


@torch.no_grad()
def sample(model: autopar.DistributedModule, seq: int, count: int, seed: int) -> str:
    """Continue a prompt by `count` bytes.

    All ranks ask the same question: one row each of the same text. So all see the same logits,
    and with the same random numbers they draw the same next byte.
    """
    model.eval()
    rng = torch.Generator().manual_seed(seed)
    text = list(b"def ")
    for _ in range(count):
        context = text[-seq:]
        row = torch.tensor(context + [0] * (seq - len(context)))  # padding is never attended to
        logits = model(row.expand(model.data_parallel_size, seq))[0, len(context) - 1]
        text += torch.multinomial((logits / 0.8).softmax(-1), 1, generator=rng).tolist()
    model.train()
    return bytes(text).decode(errors="replace")


# Checkpoints: whole again on any number of processes, under any strategy.


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write folder/step-N, then drop the older ones."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.save(state, checkpoint_id=folder / f"step-{step}", no_dist=not dist.is_initialized())
    if is_first():
        for old in folder.glob("step-*"):
            if old.name != f"step-{step}":
                shutil.rmtree(old)


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest complete checkpoint; return the number of steps it has behind it."""
    found = [int(p.parent.name.removeprefix("step-")) for p in folder.glob("step-*/.metadata")]
    if found:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        path = folder / f"step-{max(found)}"
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return max(found, default=0)


def is_first() -> bool:
    """Return whether this process is the one that prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with autopar.")
    parser.add_argument("--steps", type=int, default=500, help="steps in all, resumed ones too")
    parser.add_argument("--strategy", default="auto", help="auto, ddp, zero1, zero2 or zero3")
    parser.add_argument("--memory", type=int, help="limit per process in MiB")
    parser.add_argument("--batch", type=int, default=32, help="rows of all processes together")
    parser.add_argument("--seq", type=int, default=128, help="bytes in a row")
    parser.add_argument("--sample", type=int, default=300, help="bytes to write at the end")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="where results go")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train, measure, sample."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    text, held_out = read_stdlib()
    example = next(batches(text, args.batch, args.seq, args.seed))
    memory = args.memory and args.memory << 20

    model = autopar.compile(
        GPT(args.seq), example_inputs=example, strategy=args.strategy, memory=memory
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    console = Console(quiet=not is_first(), highlight=False)
    if is_first():
        print(model.plan)
        args.out.mkdir(parents=True, exist_ok=True)
        model.plan.save(args.out / "plan.json")
        model.plan.report(args.out / "plan.html")
    done = resume(args.out, model, optimizer)
    if done:
        console.print(f"resuming at step {done} from {args.out}")

    columns = "[progress.description]{task.description}", BarColumn(), MofNCompleteColumn()
    figures = "loss {task.fields[loss]:.3f}", "{task.fields[rate]:,.0f} tokens/s"
    with Progress(*columns, *figures, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("train", total=args.steps, completed=done, loss=math.nan, rate=0)
        data, since = batches(text, args.batch, args.seq, args.seed, done), time.perf_counter()
        for step, (x, y) in zip(range(done + 1, args.steps + 1), data, strict=False):
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

            rate = (step - done) * y.numel() / (time.perf_counter() - since)
            progress.update(task, completed=step, loss=loss.item(), rate=rate)
            if step % EVERY == 0 or step == args.steps:
                save(args.out, model, optimizer, step)
                console.print(f"step {step}: loss {loss.item():.3f}, {rate:,.0f} tokens/s")

    for name, nats in [
        ("validation", validate(model, held_out, args.batch, args.seq)),
        ("unigram model", unigram_loss(text, held_out)),
    ]:
        console.print(f"{name}: {nats:.3f} nats/byte, {nats / math.log(2):.3f} bits/byte")
    if args.sample:
        console.print(sample(model, args.seq, args.sample, args.seed), markup=False)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
