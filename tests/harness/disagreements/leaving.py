"""Ranks that end, raise or hang while the others train."""

import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.harness.disagreements.loop import FAULT, ROWS, WIDTH, Loop, Model


class EndsEarly(Loop):
    leaves = True

    def loader(self) -> Iterator[tuple[int, Tensor]]:
        return ((step, x) for step, x in super().loader() if step < FAULT)


class RaisesBetweenSteps(Loop):
    def begin_step(self, step: int) -> None:
        if step == FAULT:
            raise StopIteration("the loader is exhausted")


class RaisesAfterForward(Loop):
    def backward(self, step: int, loss: Tensor) -> None:
        if step == FAULT:
            raise ValueError("a bug in this rank's loop")
        super().backward(step, loss)


class SkipsAFailedStep(Loop):
    """An error is caught on one rank, and training goes on there."""

    def forward(self, step: int, x: Tensor) -> Tensor:
        if step == FAULT:
            x = x[:, :5]
            try:
                return super().forward(step, x)
            except RuntimeError:
                return super().forward(step + 1, self.data(step + 1))
        return super().forward(step, x)


class Exits(Loop):
    leaves = True

    def begin_step(self, step: int) -> None:
        if step == FAULT:
            os._exit(0)


class WaitsForEver(Loop):
    """One rank asks the others for something that they do not know of."""

    def begin_step(self, step: int) -> None:
        if step == FAULT:
            torch.distributed.barrier()


class CatchesABadIndex(Loop):
    """One rank meets an error between collectives, catches it, and goes on."""

    only = ("ddp", "zero3")

    class Everyone(Loop):
        batch_mode = "local"

        def make(self) -> nn.Module:
            class Lookup(Model):
                def __init__(self) -> None:
                    super().__init__()
                    self.table = nn.Embedding(4, WIDTH)

                def forward(self, x: Tensor) -> Tensor:
                    return super().forward(self.table(x))

            return Lookup()

        def data(self, step: int) -> Tensor:
            return torch.full((ROWS,), step % 4)

    class Odd(Everyone):
        def data(self, step: int) -> Tensor:
            return super().data(step) + 10 * (step == FAULT)

        def forward(self, step: int, x: Tensor) -> Tensor:
            try:
                return super().forward(step, x)
            except IndexError:
                return super().forward(step, self.data(step + 1))
