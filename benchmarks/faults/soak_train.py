"""The training script of the soak: the example GPT in float64, as one process would train it."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import Tensor

import autopar
from benchmarks.faults.injection import Injector
from examples.train_gpt import GPT, batch, read_stdlib

EVERY = 20  # steps between checkpoints
ENDLESS = 10_000_000  # steps
SEQ, ROWS = 64, 12


def text() -> Tensor:
    return read_stdlib(1_000_000)[0]


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SEQ, width=48, heads=4, layers=2).double()


def rows(data: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return the global batch of a step."""
    return batch(data, ROWS, SEQ, step)


def optimizer(trained: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained.parameters(), lr=1e-3)


class Reference:
    """Losses of one process that nothing interrupts, in a thread that follows the run."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.wanted = 0
        threading.Thread(target=self._train, daemon=True).start()

    def _train(self) -> None:
        data, plain = text(), model()
        adam = optimizer(plain)
        while True:
            if len(self.losses) >= self.wanted:
                time.sleep(0.2)
                continue
            loss = plain(*rows(data, len(self.losses) + 1))
            loss.backward()
            adam.step()
            adam.zero_grad()
            self.losses.append(loss.item())


def main(folder: Path, strategy: str, step_s: float) -> None:
    """Train without end; note every attempt and the loss of every step."""
    torch.set_num_threads(1)
    injector, data = Injector(folder, int(os.environ["RANK"])), text()
    injector.note("start", pid=os.getpid())
    compiled = autopar.compile(model(), strategy=strategy, example_inputs=rows(data, 0))
    adam = optimizer(compiled)
    checkpointer = autopar.Checkpointer(folder / "disk", compiled, adam, every=EVERY)
    injector.note("resumed", step=checkpointer.resume())
    for step, number in checkpointer.steps(range(1, ENDLESS), total=ENDLESS):
        began = time.monotonic()
        loss = compiled(*rows(data, number))
        loss.backward()
        adam.step()
        adam.zero_grad()
        if injector.rank == 0:
            injector.note("step", step=step, loss=loss.item(), pid=os.getpid())
        time.sleep(max(0.0, step_s - time.monotonic() + began))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
