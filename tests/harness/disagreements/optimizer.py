"""Ranks that disagree about optimizer steps, clipping, parameters and checkpoints."""

import torch
from torch import nn

from tests.harness.disagreements.loop import FAULT, WIDTH, Loop, Model


class AnotherRate(Loop):
    def rate(self) -> float:
        return 0.2


class AnotherRateLater(Loop):
    def begin_step(self, step: int) -> None:
        if step == FAULT:
            self.optimizer.param_groups[0]["lr"] *= 0.1


class AnotherOptimizer(Loop):
    def make_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)


class SkipsTheUpdate(Loop):
    def update(self, step: int) -> None:
        if step != FAULT:
            super().update(step)


class ForgetsToZero(Loop):
    only = ("ddp", "tp")

    def update(self, step: int) -> None:
        self.optimizer.step()
        if step != FAULT:
            self.optimizer.zero_grad()


class ChangesAParameter(Loop):
    only = ("ddp", "tp")

    def begin_step(self, step: int) -> None:
        if step == FAULT:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1.01)


class ChangesABuffer(Loop):
    def begin_step(self, step: int) -> None:
        if step >= FAULT:
            self.model.mean.add_(1.0)


class LoadsAnotherCheckpoint(Loop):
    only = ("ddp", "zero2", "zero3")

    def begin_step(self, step: int) -> None:
        if step == 1:
            self.model.load_state_dict(Model(seed=7).state_dict() | {"mean": torch.ones(WIDTH)})


class ClipsAlone(Loop):
    def clip(self, step: int) -> None:
        if step == FAULT:
            self.model.clip_grad_norm_(1.0)


class ClipsOtherwise(Loop):
    class Everyone(Loop):
        norm = 1.0

        def clip(self, step: int) -> None:
            self.model.clip_grad_norm_(self.norm)

    class Odd(Everyone):
        norm = 0.1


class ClipsByTorchAlone(Loop):
    only = ("ddp", "zero3")

    def clip(self, step: int) -> None:
        if step == FAULT:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)


class SavesAlone(Loop):
    only = ("pp", "pp, 2 micro-batches")

    def after(self, step: int) -> None:
        if step == FAULT:
            self.model.state_dict()


class GathersAlone(Loop):
    only = ("zero2", "zero3")

    def after(self, step: int) -> None:
        if step == FAULT:
            for parameter in self.model.parameters():
                parameter.full_tensor()


class ChecksAlone(Loop):
    def after(self, step: int) -> None:
        if step == FAULT:
            self.model.check_replicas()


class RateSeenByCheck(Loop):
    """The learning rate changes after the last step: nothing is seen until all is compared."""

    class Everyone(Loop):
        def end(self) -> None:
            self.model.check_replicas(self.optimizer)

    class Odd(Everyone):
        def end(self) -> None:
            self.optimizer.param_groups[0]["lr"] = 0.3
            super().end()


class PartedSeenByCheck(RateSeenByCheck):
    only = ("ddp", "tp")

    class Odd(RateSeenByCheck.Everyone):
        def end(self) -> None:
            with torch.no_grad():
                next(iter(self.model.parameters())).add_(1e-6)
            super().end()
