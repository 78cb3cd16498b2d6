"""Differences between ranks that are allowed."""

import copy
import random
from pathlib import Path

import torch
from torch import nn

from tests.harness.disagreements.loop import FAULT, Loop, Model


class LocalRows(Loop):
    legitimate, only = True, ("ddp", "zero2", "zero3")

    class Everyone(Loop):
        batch_mode = "local"

        def seed(self, step: int) -> int:
            return 100 * self.rank + step

    class Odd(Everyone):
        pass


class ChecksEverything(Loop):
    legitimate = True

    class Everyone(Loop):
        def after(self, step: int) -> None:
            self.model.check_replicas(self.optimizer)

    class Odd(Everyone):
        pass


class AnotherSeed(Loop):
    """Every rank seeds itself; parameters are those of rank 0."""

    legitimate = True

    def make(self) -> nn.Module:
        random.seed(self.rank)
        return Model(seed=1000 + self.rank)


class SlowRank(Loop):
    legitimate, only = True, ("ddp", "pp")

    def begin_step(self, step: int) -> None:
        if step == FAULT:
            import time

            time.sleep(1.5)


class SavesOnOneRank(Loop):
    legitimate, only = True, ("ddp", "zero3")

    def after(self, step: int) -> None:
        torch.save(copy.copy(self.model.state_dict()), Path(self.folder, "state.pt"))


class Verbose(Loop):
    """One rank reads losses, norms and gradients, and prints."""

    legitimate = True

    def after(self, step: int) -> None:
        for name, parameter in self.model.named_parameters():
            str((name, parameter.shape, parameter.requires_grad))
        sum(p.numel() for p in self.model.parameters())
