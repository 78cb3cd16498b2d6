"""The training script of the trials: a GPT of two blocks with `autopar.Checkpointer`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.runtime import start
from autopar.train.checkpoints.background import BackgroundWriter
from benchmarks.faults.injection import Injector
from benchmarks.models import DecoderBlock

EVERY = 4  # steps between checkpoints
ROWS, SEQ, WIDTH, VOCABULARY = 12, 8, 16, 64
STEP_S = 0.05  # least time of a step, so that faults find one

STRATEGIES = {
    "ddp": {"zero": 0},
    "zero3": {"zero": 3},
    "tp2": {"zero": 0, "tp": 2},
    "pp2": {"zero": 0, "pp": 2, "micro_batches": 2},
}


class Model(nn.Module):
    """Two blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(DecoderBlock(WIDTH, 2) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.token(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the global batch of a step."""
    rng = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (ROWS, SEQ + 1), generator=rng)
    return tokens[:, :-1], tokens[:, 1:]


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def plain_losses(steps: int) -> list[float]:
    """Return the losses of one process that nothing interrupts."""
    plain = model()
    adam, losses = optimizer(plain.parameters()), []
    for step in range(1, steps + 1):
        loss = plain(*batch(step))
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def strategy(name: str) -> Any:
    """Return a strategy that leaves nothing to measure; "auto" leaves everything."""
    if name == "auto":
        return "auto"
    sizes = {"gather_bytes": 1 << 14, "reduce_bytes": 1 << 14, "prefetch": 1}
    return autopar.Strategy(recompute="none", **sizes, **STRATEGIES[name])


def main(folder: Path, name: str, total: int) -> None:
    """Train until step `total`, with the faults of the schedule."""
    torch.set_num_threads(1)
    injector = Injector(folder, int(os.environ["RANK"]))
    injector.note("start")
    trained = model()
    with contextlib.ExitStack() as planning:
        strike_in_rendezvous(injector, planning)
        compiled = autopar.compile(
            trained, strategy=strategy(name), example_inputs=batch(0), fallback=False, timeout_s=60
        )
    injector.note("planned")
    adam = optimizer(compiled.parameters())
    checkpointer = autopar.Checkpointer(folder / "disk", compiled, adam, every=EVERY)
    with injector.during("load"):
        done = checkpointer.resume()
    injector.note("resumed", step=done)
    strike_in_saves(injector, checkpointer)
    for step, number in checkpointer.steps(range(1, total + 1), total=total):
        began = time.monotonic()
        with injector.during("step", step):
            loss = compiled(*batch(number))
            loss.backward()
            adam.step()
            adam.zero_grad()
            time.sleep(max(0.0, STEP_S - time.monotonic() + began))
        if injector.rank == 0:
            injector.note("step", step=step, loss=loss.item())


def strike_in_rendezvous(injector: Injector, planning: contextlib.ExitStack) -> None:
    """Let faults of the rendezvous strike in it, and those of planning behind it."""
    meet = start._initialize

    @functools.wraps(meet)
    def watched(*arguments: Any) -> None:
        with injector.during("rendezvous"):
            meet(*arguments)
        planning.enter_context(injector.during("planning"))

    start._initialize = watched


def strike_in_saves(injector: Injector, checkpointer: autopar.Checkpointer) -> None:
    write = BackgroundWriter._write

    @functools.wraps(write)
    def watched(self: BackgroundWriter, step: int, *arguments: Any) -> None:
        with injector.during("save", step):
            write(self, step, *arguments)

    BackgroundWriter._write = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
