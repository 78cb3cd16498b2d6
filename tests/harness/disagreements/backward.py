"""Ranks that disagree about a backward."""

from torch import Tensor

from tests.harness.disagreements.loop import FAULT, STEPS, Loop


class SkipsBackward(Loop):
    def backward(self, step: int, loss: Tensor) -> None:
        if step != FAULT:
            super().backward(step, loss)


class SkipsLastBackward(Loop):
    def backward(self, step: int, loss: Tensor) -> None:
        if step != STEPS - 1:
            super().backward(step, loss)

    leaves = True


class RunsBackwardTwice(Loop):
    def backward(self, step: int, loss: Tensor) -> None:
        if step == FAULT:
            loss.backward(retain_graph=True)
        super().backward(step, loss)


class ScalesTheLoss(Loop):
    def backward(self, step: int, loss: Tensor) -> None:
        super().backward(step, loss * 2 if step == FAULT else loss)


class NoSyncAlone(Loop):
    only = ("ddp", "zero2", "zero3")

    def forward(self, step: int, x: Tensor) -> Tensor:
        if step != FAULT:
            return super().forward(step, x)
        with self.model.no_sync():
            return super().forward(step, x)


class LeavesNoSyncEarly(Loop):
    only = ("ddp", "zero2", "zero3")

    class Everyone(Loop):
        def held(self, step: int) -> bool:
            return step % 3 != 2

        def forward(self, step: int, x: Tensor) -> Tensor:
            if not self.held(step):
                return super().forward(step, x)
            with self.model.no_sync():
                return super().forward(step, x)

        def update(self, step: int) -> None:
            if not self.held(step):
                super().update(step)

    class Odd(Everyone):
        def held(self, step: int) -> bool:
            return step % 3 == 0


class BackwardOutOfOrder(Loop):
    class Everyone(Loop):
        def backward(self, step: int, loss: Tensor) -> None:
            again = self.model(self.data(step + 100))
            for each in self.ordered([loss, again]):
                each.backward()

        def ordered(self, losses: list[Tensor]) -> list[Tensor]:
            return losses

    class Odd(Everyone):
        def ordered(self, losses: list[Tensor]) -> list[Tensor]:
            return losses[::-1]


class FreezesLate(Loop):
    def begin_step(self, step: int) -> None:
        if step == FAULT:
            for parameter in list(self.model.parameters())[:1]:
                parameter.requires_grad_(False)


class GradientHookAlone(Loop):
    def make_optimizer(self) -> None:
        super().make_optimizer()
        next(iter(self.model.parameters())).register_hook(lambda g: g * 2)


class RaisesInHook(Loop):
    def make_optimizer(self) -> None:
        super().make_optimizer()

        def broken(gradient: Tensor) -> None:
            raise ValueError("a bug of this rank's hook")

        next(iter(self.model.parameters())).register_hook(broken)
