"""What compressing gradients costs in training: the loss on held-out data after 500 steps.

    python -m benchmarks.quality --json FILE

A GPT on the source of Python's standard library, and a conv net on images that a fixed program
draws, each on two processes, from the same seeds and with the same batches, whatever is
compressed. Settings were chosen with nothing compressed. Those that keep a state are trained again
from a checkpoint halfway, which is to end bit for bit where going on ended.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import autopar
from benchmarks.peers import words
from benchmarks.report import document
from examples.train_gpt import GPT, batch, read_stdlib
from tests.harness.worlds import run_isolated

RANKS = 2
STEPS = 500
WARM_UP = 50
LAST_RATE = 0.05  # of the highest learning rate, at the last step
VALIDATION_BATCHES = 32
PATIENCE = 7200.0  # seconds that a training may take
SEQ = 64

COMPRESSIONS = {
    "uncompressed": "none",
    "bf16": "bf16",
    "int8": "int8",
    "powersgd": "powersgd(rank=4)",
    "topk": "topk(density=0.01)",
    "topk without feedback": "topk(density=0.01, feedback=False)",
    "sign": "sign",
}
TARGETS = {"bf16": 0.005, "int8": 0.005, "powersgd": 0.02, "topk": 0.02}
RESUMED = ("powersgd", "topk", "sign")

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A model, its data and how it is trained.

    Attributes:
        build: makes the model, which returns its own loss; the caller seeds.
        batches: makes what gives the batch of each step, and that of each validation batch.
        learning_rate: the highest.
        optimizer: of the parameters, at a learning rate.
    """

    build: Callable[[], nn.Module]
    batches: Callable[[], tuple[Callable[[int], Batch], Callable[[int], Batch]]]
    learning_rate: float
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW


class ConvNet(nn.Module):
    """Three convolutions, each with batch norm, and a linear layer: 0.1 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128)
        layers: list[nn.Module] = []
        for inner, outer in pairwise(widths):
            conv = nn.Conv2d(inner, outer, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(outer), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of classifying images `x` [rows, 3, SIDE, SIDE] as `y`."""
        return F.cross_entropy(self.head(self.layers(x).mean((2, 3))), y)


CLASSES, SIDE = 10, 16


def text() -> tuple[Callable[[int], Batch], Callable[[int], Batch]]:
    """Return 16 rows of text for each step, and of held-out text."""
    train, held_out = read_stdlib()
    rows = partial(batch, rows=16, seq=SEQ)
    return (lambda step: rows(train, seed=step)), (lambda step: rows(held_out, seed=step))


def images() -> tuple[Callable[[int], Batch], Callable[[int], Batch]]:
    """Return 64 images for each step, and others that no step is given."""
    return gratings, lambda step: gratings(10**6 + step)


def gratings(seed: int, rows: int = 64) -> Batch:
    """Draw stripes under noise; the class is their direction, about which images differ a little.

    So that no classifier is always right, and losses stay away from zero.
    """
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (rows,), generator=rng)
    angle = (y + 0.35 * torch.randn(rows, generator=rng)) * math.pi / CLASSES
    phase = 2 * math.pi * torch.rand(rows, 3, 1, 1, generator=rng)
    at = torch.arange(SIDE) - SIDE / 2
    along = torch.einsum("r,i->ri", angle.cos(), at)[:, :, None]
    along = along + torch.einsum("r,j->rj", angle.sin(), at)[:, None, :]
    stripes = torch.sin(2 * math.pi * along[:, None] / 5 + phase)
    return stripes + torch.randn(rows, 3, SIDE, SIDE, generator=rng), y


_GPT = partial(GPT, SEQ, width=128, heads=4, layers=4)
TASKS = {
    "gpt": Task(_GPT, text, 2e-3),
    "gpt-sgd": Task(_GPT, text, 5e-2, partial(torch.optim.SGD, momentum=0.9)),
    "conv": Task(ConvNet, images, 3e-3),
}
"""Methods with feedback were published for SGD with momentum, hence that too."""


@dataclass(frozen=True)
class Run:
    """How one training ended, on this rank.

    Attributes:
        losses: of every step.
        validation: mean loss over held-out data at the end.
        digest: of every parameter at the end.
        seconds: that it took.
    """

    losses: list[float]
    validation: float
    digest: str
    seconds: float


def train(
    rank: int, world_size: int, *, task: str, compress: str, steps: int, folder: str, resume: bool
) -> Run:
    """Train on one rank; the first half leaves a checkpoint, from which the second may start."""
    began = time.monotonic()
    chosen = TASKS[task]
    give, give_validation = chosen.batches()
    torch.manual_seed(0)
    strategy = autopar.Strategy(
        zero=0, recompute="none", gather_bytes=1 << 20, reduce_bytes=1 << 20, compress=compress
    )
    model = autopar.compile(
        chosen.build(),
        example_inputs=give(0),
        strategy=strategy,
        fallback=False,
        timeout_s=PATIENCE,
    )
    optimizer = chosen.optimizer(model.parameters(), lr=chosen.learning_rate)
    schedule = LambdaLR(optimizer, partial(share, steps=steps))
    path, half, losses = Path(folder, f"rank{rank}.pt"), steps // 2, []
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if resume:
        saved = torch.load(path)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for step in range(half if resume else 0, steps):
        if step == half and not resume:
            torch.save({name: part.state_dict() for name, part in parts.items()}, path)
        loss = model(*give(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        held_out = [model(*give_validation(step)).item() for step in range(VALIDATION_BATCHES)]
    seconds = time.monotonic() - began
    return Run(losses, sum(held_out) / len(held_out), digest(model), seconds)


def share(step: int, steps: int) -> float:
    """Return the learning rate of a step, as a part of the highest: up, then down in a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def digest(model: nn.Module) -> str:
    """Return a hash of the bits of all parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class Row:
    """One training, whatever of it was compressed.

    Attributes:
        validation: mean loss on held-out data after the last step.
        worse: by how much that is above the loss of the uncompressed training, relative to it.
        target: the most that this may be.
        resumed: whether going on from a checkpoint halfway ended with the same bits.
        losses: of the training steps, the mean of each ten.
        seconds: of the training.
    """

    task: str
    compression: str
    validation: float
    worse: float | None = None
    target: float | None = None
    resumed: bool | None = None
    losses: tuple[float, ...] = ()
    seconds: float = 0.0

    @property
    def fails(self) -> bool:
        """Whether it is not what it should be."""
        far = self.target is not None and self.worse is not None and self.worse > self.target
        return far or self.resumed is False


def compare(task: str, names: Sequence[str], steps: int, console: Console) -> list[Row]:
    """Train with each compression and show what became of it."""
    made: list[Row] = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"task": task, "compress": COMPRESSIONS[name]}
            options |= {"steps": steps, "folder": folder, "timeout": PATIENCE, "init": False}
            first, *others = run_isolated(train, RANKS, resume=False, **options)
            resumed = None
            if name in RESUMED:
                again = run_isolated(train, RANKS, resume=True, **options)
                resumed = all(run.digest == first.digest for run in again)
        assert all(run.digest == first.digest for run in others), f"ranks differ under {name}"
        base = made[0].validation if made else first.validation
        tens = [sum(first.losses[i : i + 10]) / 10 for i in range(0, steps, 10)]
        row = Row(
            task,
            name,
            first.validation,
            first.validation / base - 1 if made else None,
            TARGETS.get(name),
            resumed,
            tuple(round(loss, 4) for loss in tens),
            round(first.seconds, 1),
        )
        console.print(f"{task}, {name}: {row.validation:.4f} in {row.seconds:.0f} s")
        made.append(row)
    return made


def table(made: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("task", "compression"):
        drawn.add_column(heading, no_wrap=True)
    for heading in ("validation loss", "above uncompressed", "target", "resumes exactly"):
        drawn.add_column(heading, justify="right")
    for row in made:
        worse = "" if row.worse is None else f"{row.worse:+.2%}"
        target = "" if row.target is None else f"{row.target:.1%}"
        resumed = {True: "yes", False: "NO", None: ""}[row.resumed]
        cells = [row.task, row.compression, f"{row.validation:.4f}", worse, target, resumed]
        drawn.add_row(*cells, style="red" if row.fails else "")
    return drawn


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description="Train with compressed gradients."
    )
    parser.add_argument("--tasks", type=words, default=list(TASKS), metavar="NAMES")
    parser.add_argument("--compressions", type=words, default=list(COMPRESSIONS), metavar="NAMES")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    for given, known in ((args.tasks, TASKS), (args.compressions, COMPRESSIONS)):
        if unknown := set(given) - set(known):
            parser.error(f"there are no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return args


def main() -> int:
    """Train everything; return 1 if any is further from the uncompressed one than it should be."""
    args, console = parse_arguments(), Console(width=140)
    names = ["uncompressed", *(name for name in args.compressions if name != "uncompressed")]
    made: list[Row] = []
    for task in args.tasks:
        made += compare(task, names, args.steps, console)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            shown = {**document([]), "steps": args.steps, "rows": [asdict(row) for row in made]}
            args.json.write_text(json.dumps(shown, indent=1) + "\n")
    console.print(table(made))
    return int(any(row.fails for row in made))


if __name__ == "__main__":
    sys.exit(main())
