"""Ranks that disagree before training: models, arguments, plans, versions."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from tests.harness.disagreements.loop import WIDTH, Loop, Model, named_alike, square
from tests.harness.training import fixed


class AnotherSize(Loop):
    def make(self) -> nn.Module:
        model = Model()
        model.layers.append(nn.Linear(WIDTH, WIDTH))
        return model


class AnotherBuffer(Loop):
    def make(self) -> nn.Module:
        model = Model()
        model.register_buffer("more", torch.zeros(3))
        return model


class AnotherDtype(Loop):
    def make(self) -> nn.Module:
        return Model().double()


class FrozenAtStart(Loop):
    def make(self) -> nn.Module:
        model = Model()
        model.layers[0].requires_grad_(False)
        return model


class AnotherForward(Loop):
    def make(self) -> nn.Module:
        class Changed(Model):
            def forward(self, x: Tensor) -> Tensor:
                return self.body(x).abs().mean()

        return named_alike(Changed)()


class AnotherAttribute(Loop):
    def make(self) -> nn.Module:
        return Model(scale=0.5)


class AnotherConstant(Loop):
    """A tensor that is no buffer, drawn by each rank for itself."""

    class Everyone(Loop):
        def make(self) -> nn.Module:
            class Noisy(Model):
                def __init__(self, seed: int) -> None:
                    super().__init__()
                    self.noise = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))

                def forward(self, x: Tensor) -> Tensor:
                    return (self.body(x) + self.noise).square().mean()

            return Noisy(self.noise_seed())

        def noise_seed(self) -> int:
            return 0

    class Odd(Everyone):
        def noise_seed(self) -> int:
            return 1


class ForwardByRank(Loop):
    class Everyone(Loop):
        def make(self) -> nn.Module:
            class ByRank(Model):
                def forward(self, x: Tensor) -> Tensor:
                    rank = int(os.environ["RANK"])
                    return (self.body(x) * (2.0 if rank else 1.0)).square().mean()

            return ByRank()

    class Odd(Everyone):
        pass


class AnotherLoss(Loop):
    class Everyone(Loop):
        factor = 1.0

        def make(self) -> nn.Module:
            class Body(Model):
                def forward(self, x: Tensor) -> Tensor:
                    return self.body(x)

            return Body()

        def options(self) -> dict[str, Any]:
            factor = self.factor

            def loss_fn(output: Tensor, target: Tensor) -> Tensor:
                return square(output, target) * factor

            return {**super().options(), "loss_fn": loss_fn}

        def forward(self, step: int, x: Tensor) -> Tensor:
            return self.model(x, torch.zeros_like(x))

    class Odd(Everyone):
        factor = 2.0


class NoLoss(AnotherLoss):
    class Odd(AnotherLoss.Everyone):
        def options(self) -> dict[str, Any]:
            return Loop.options(self)


class AnotherStrategy(Loop):
    def plan_options(self) -> dict[str, Any]:
        own = super().plan_options()
        return {**own, "zero": 3 if own["zero"] != 3 else 0}


class AnotherBatchMode(Loop):
    batch_mode = "local"


class AnotherPrecision(Loop):
    def options(self) -> dict[str, Any]:
        return {**super().options(), "precision": "bf16"}


class AnotherBackend(Loop):
    def options(self) -> dict[str, Any]:
        return {**super().options(), "backend": "inductor"}


class AnotherWorldSize(Loop):
    def compile(self) -> None:
        self.model = autopar.compile(self.make(), self.size + 1, **self.options())


class ExampleInputsAlone(Loop):
    def options(self) -> dict[str, Any]:
        return {**super().options(), "example_inputs": (self.data(0),)}


class AnotherPlan(Loop):
    only = ("ddp", "zero3")

    class Everyone(Loop):
        zero = 0

        def options(self) -> dict[str, Any]:
            plan = autopar.plan(
                Model(), self.size, example_inputs=(self.data(0),), strategy=fixed(self.zero)
            )
            return {"plan": plan, "fallback": False}

    class Odd(Everyone):
        zero = 3


class OldPlanFile(AnotherPlan):
    class Odd(AnotherPlan.Everyone):
        def options(self) -> dict[str, Any]:
            options, path = super().options(), Path(self.folder, "plan.json")
            options["plan"].save(path)
            path.write_text(path.read_text().replace('"schema_version": ', '"schema_version": 9'))
            return {**options, "plan": autopar.Plan.load(path)}


class RaisesBeforeCompile(Loop):
    def make(self) -> nn.Module:
        raise ValueError("a file is missing")


class DoesNotCompile(Loop):
    leaves = True

    def run(self) -> list[float]:
        return []


class RaisesInForward(Loop):
    def make(self) -> nn.Module:
        class Broken(Model):
            def forward(self, x: Tensor) -> Tensor:
                raise KeyError("a bug of this rank's copy")

        return named_alike(Broken)()


class OtherVersion(Loop):
    def compile(self) -> None:
        before, autopar.__version__ = autopar.__version__, "0.0.9"
        try:
            super().compile()
        finally:
            autopar.__version__ = before
