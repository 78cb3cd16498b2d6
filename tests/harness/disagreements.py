"""Scenarios in which one rank does something else than the others, as classes of training loops.

Every rank runs `Loop`, and the last rank a subclass of it that differs in one respect. Subclasses
of `Legitimate` differ in what ranks may differ in: they must train.
"""

import copy
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import autopar
from tests.harness.training import fixed

STEPS, FAULT = 7, 2
ROWS, WIDTH, LAYERS = 12, 12, 6

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"zero": 0},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "tp": {"zero": 0, "tp": "size"},
    "pp": {"zero": 0, "pp": "size", "schedule": "1f1b", "micro_batches": 1},
    "pp, 2 micro-batches": {"zero": 0, "pp": "size", "schedule": "1f1b", "micro_batches": 2},
}


class Model(nn.Module):
    """Some layers, a running mean in a buffer, and a loss."""

    def __init__(self, seed: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.scale = scale

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) * self.scale).square().mean()


def named_alike(kind: type[nn.Module]) -> type[nn.Module]:
    """A class by the name of `Model`, which other ranks do not know from it."""
    kind.__name__ = Model.__name__
    return kind


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Loop:
    """A training loop in steps that a scenario can change on one rank.

    Args:
        rank: this one.
        size: of the world.
        strategy: a key of `STRATEGIES`.
        folder: for files.
    """

    batch_mode: ClassVar[str] = "global"
    abstract: ClassVar[bool] = False
    """Whether it is no scenario."""
    only: ClassVar[tuple[str, ...]] = ()
    """Strategies under which the scenario is one; () for all."""
    leaves: ClassVar[bool] = False
    """Whether the odd rank leaves without an error."""
    legitimate: ClassVar[bool] = False
    """Whether ranks may differ so, and train."""

    def __init__(self, rank: int, size: int, strategy: str, folder: str) -> None:
        self.rank, self.size, self.strategy, self.folder = rank, size, strategy, folder
        self.losses: list[float] = []

    def plan_options(self) -> dict[str, Any]:
        options = dict(STRATEGIES[self.strategy])
        return {k: self.size if v == "size" else v for k, v in options.items()}

    def options(self) -> dict[str, Any]:
        strategy = fixed(**self.plan_options())
        return {"strategy": strategy, "batch": self.batch_mode, "fallback": False}

    def make(self) -> nn.Module:
        return Model()

    def compile(self) -> None:
        self.model = autopar.compile(self.make(), **self.options())

    def rate(self) -> float:
        return 0.1

    def make_optimizer(self) -> None:
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(parameters, lr=self.rate(), momentum=0.9)

    def rows(self, step: int) -> int:
        return ROWS

    def seed(self, step: int) -> int:
        return step

    def data(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed(step))
        return torch.randn(self.rows(step), WIDTH, generator=generator)

    def loader(self) -> Iterator[tuple[int, Tensor]]:
        for step in range(STEPS):
            yield step, self.data(step)

    def forward(self, step: int, x: Tensor) -> Tensor:
        return self.model(x)

    def backward(self, step: int, loss: Tensor) -> None:
        loss.backward()

    def clip(self, step: int) -> None:
        return None

    def update(self, step: int) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def after(self, step: int) -> None:
        return None

    def end(self) -> None:
        return None

    def begin_step(self, step: int) -> None:
        """The place of faults that happen between two steps."""

    def run(self) -> list[float]:
        """Trains; gives the losses."""
        self.compile()
        self.make_optimizer()
        for step, x in self.loader():
            self.begin_step(step)
            loss = self.forward(step, x)
            self.backward(step, loss)
            self.clip(step)
            self.update(step)
            self.after(step)
            self.losses.append(loss.item())
        self.end()
        return self.losses


# -- before training -----------------------------------------------------------------------------


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


# -- calls ---------------------------------------------------------------------------------------


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


# -- backward ------------------------------------------------------------------------------------


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


# -- optimizer, clipping, state --------------------------------------------------------------------


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


# -- leaving ---------------------------------------------------------------------------------------


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


# -- a model that trains under torch's DDP ---------------------------------------------------------


class Fallback(Loop):
    """The model branches on a value and cannot be captured."""

    abstract = True

    def make(self) -> nn.Module:
        class Branching(Model):
            def forward(self, x: Tensor) -> Tensor:
                out = self.body(x)
                return out.square().mean() if out.sum() > 1e9 else out.square().mean() * 2

        return named_alike(Branching)()

    def options(self) -> dict[str, Any]:
        return {**super().options(), "fallback": True, "example_inputs": (self.data(0),)}


class FallbackSkipsBackward(Loop):
    only, Everyone = ("ddp", "zero3"), Fallback

    class Odd(SkipsBackward, Fallback):
        pass


class FallbackNoSyncAlone(Loop):
    only, Everyone = ("ddp",), Fallback

    class Odd(NoSyncAlone, Fallback):
        pass


class FallbackEvaluatesAlone(Loop):
    only, Everyone = ("ddp", "zero3"), Fallback

    class Odd(EvaluatesAlone, Fallback):
        pass


class FallbackAlone(Loop):
    """Only one rank's forward can not be captured."""

    class Odd(Fallback):
        def options(self) -> dict[str, Any]:
            return {**super().options(), "example_inputs": None}


class FallbackAnotherRate(Loop):
    only, Everyone = ("ddp", "zero3"), Fallback

    class Odd(AnotherRate, Fallback):
        pass


class FallbackTrains(Loop):
    only, Everyone, legitimate = ("ddp", "zero3"), Fallback, True

    class Odd(Fallback):
        pass


# -- legitimate ------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Scenario:
    """One disagreement under one strategy."""

    name: str
    strategy: str

    @property
    def kind(self) -> type[Loop]:
        """The class that describes it."""
        return SCENARIOS[self.name]

    def loop(self, rank: int, size: int, folder: str) -> Loop:
        """What a rank runs: the last one differs."""
        kind = self.kind
        odd, others = getattr(kind, "Odd", kind), getattr(kind, "Everyone", Loop)
        return (odd if rank == size - 1 else others)(rank, size, self.strategy, folder)


def _kinds(kind: type[Loop]) -> Iterator[type[Loop]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _kinds(sub)


SCENARIOS = {
    kind.__name__: kind
    for kind in dict.fromkeys(_kinds(Loop))
    if "." not in kind.__qualname__ and not vars(kind).get("abstract")
}


def scenarios(strategies: int) -> list[Scenario]:
    """Every disagreement under so many of the strategies that it is one under, in turn."""
    found, turn = [], 0
    for name, kind in SCENARIOS.items():
        suited = [s for s in STRATEGIES if not kind.only or s in kind.only]
        for _ in range(min(strategies, len(suited))):
            found.append(Scenario(name, suited[turn % len(suited)]))
            turn += 1
    return list(dict.fromkeys(found))
