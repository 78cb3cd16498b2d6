"""Disagreements of a model that trains under DistributedDataParallel."""

from typing import Any

from torch import Tensor, nn

from tests.harness.disagreements.backward import NoSyncAlone, SkipsBackward
from tests.harness.disagreements.calls import EvaluatesAlone
from tests.harness.disagreements.loop import Loop, Model, named_alike
from tests.harness.disagreements.optimizer import AnotherRate


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
