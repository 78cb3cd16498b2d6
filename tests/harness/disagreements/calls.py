"""Ranks that disagree about a call: its mode, arguments, order and number."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from tests.harness.disagreements.loop import FAULT, ROWS, STEPS, WIDTH, Loop, Model


class EvaluatesAlone(Loop):
    def begin_step(self, step: int) -> None:
        self.model.train(step != FAULT)


class NoGradAlone(Loop):
    def begin_step(self, step: int) -> None:
        if step == FAULT:
            with torch.no_grad():
                self.model(self.data(step))


class OneModuleEvaluates(Loop):
    def begin_step(self, step: int) -> None:
        if step == FAULT:
            self.model.layers[0].eval()


class CallsTwice(Loop):
    def begin_step(self, step: int) -> None:
        if step == FAULT:
            self.model(self.data(step))


class SkipsAStep(Loop):
    def loader(self) -> Iterator[tuple[int, Tensor]]:
        return ((step, x) for step, x in super().loader() if step != FAULT)


class AnotherShape(Loop):
    class Everyone(Loop):
        def make(self) -> nn.Module:
            class Rounded(Model):
                def forward(self, x: Tensor) -> Tensor:
                    return super().forward(x[..., :WIDTH])

            return Rounded()

    class Odd(Everyone):
        def data(self, step: int) -> Tensor:
            more = torch.zeros(ROWS, int(step == FAULT))
            return torch.cat([super().data(step), more], 1)


class AnotherInputDtype(Loop):
    def data(self, step: int) -> Tensor:
        x = super().data(step)
        return x.bfloat16() if step == FAULT else x


class MoreRows(Loop):
    def rows(self, step: int) -> int:
        return ROWS + 6 * (step == FAULT)


class TooFewRows(Loop):
    def rows(self, step: int) -> int:
        return 1 if step == FAULT else ROWS


class WithoutRows(Loop):
    class Everyone(Loop):
        def options(self) -> dict[str, Any]:
            return {**super().options(), "rows": {"x": 0}}

    class Odd(Everyone):
        def data(self, step: int) -> Tensor:
            return torch.ones(()) if step == FAULT else super().data(step)


class AnotherOrder(Loop):
    def seed(self, step: int) -> int:
        return STEPS - 1 - step


class MoreLocalRows(Loop):
    only = ("ddp", "zero2", "zero3")

    class Everyone(Loop):
        batch_mode = "local"

    class Odd(Everyone):
        def rows(self, step: int) -> int:
            return ROWS + 2 * (step == FAULT)


class AnotherKeyword(Loop):
    class Everyone(Loop):
        factor = 1.0

        def make(self) -> nn.Module:
            class Weighted(Model):
                def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
                    return super().forward(x) * factor

            return Weighted()

        def forward(self, step: int, x: Tensor) -> Tensor:
            return self.model(x, factor=self.factor)

    class Odd(Everyone):
        factor = 3.0


class AutocastAlone(Loop):
    def forward(self, step: int, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step == FAULT):
            return super().forward(step, x)


class InputNeedsGradient(Loop):
    def data(self, step: int) -> Tensor:
        return super().data(step).requires_grad_(step == FAULT)


class TwoModels(Loop):
    """One rank calls two modules in another order."""

    class Everyone(Loop):
        def compile(self) -> None:
            super().compile()
            self.other = autopar.compile(Model(seed=1), **self.options())

        def forward(self, step: int, x: Tensor) -> Tensor:
            return self.model(x) + self.other(x)

    class Odd(Everyone):
        def forward(self, step: int, x: Tensor) -> Tensor:
            return self.other(x) + self.model(x)
