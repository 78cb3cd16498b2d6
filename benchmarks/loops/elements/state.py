"""Evaluations, states and schedules."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from benchmarks.loops.loop import Element, Loop
from benchmarks.loops.models import batch_of


def evaluate(loop: Loop, rows: int) -> None:
    """Evaluates the model on some rows; the loss is observed."""
    x, y = batch_of(loop.recipe.net, rows, 7)
    loop.model.eval()
    with torch.no_grad():
        loop.observe(loop.loss_of(loop.model(x, y), y))
    loop.model.train()


class EvaluateFirst(Element):
    """An evaluation goes before training."""

    def before_training(self, loop: Loop) -> None:
        evaluate(loop, 6)


class EvaluateBetween(Element):
    """Evaluations of other numbers of rows stand between steps."""

    def after_step(self, loop: Loop) -> None:
        evaluate(loop, (6, 5, 1)[loop.step % 3])


class Inference(Element):
    """An evaluation under inference mode."""

    def after_training(self, loop: Loop) -> None:
        x, y = batch_of(loop.recipe.net, 4, 9)
        loop.model.eval()
        with torch.inference_mode():
            loop.observe(loop.loss_of(loop.model(x, y), y))
        loop.model.train()


class StateReloaded(Element):
    """The states of the model and the optimizer are read, and loaded after another step."""

    def after_step(self, loop: Loop) -> None:
        if loop.step == 0:
            self.model = copy.deepcopy(loop.model.state_dict())
            self.optimizer = copy.deepcopy(loop.optimizer.state_dict())
        if loop.step == 1:
            loop.model.load_state_dict(self.model)
            loop.optimizer.load_state_dict(self.optimizer)


class PlainState(Element):
    """The state of a plain model is loaded between steps."""

    def after_step(self, loop: Loop) -> None:
        if loop.step == 1:
            torch.manual_seed(31)
            other = loop.recipe.make()
            loop.model.load_state_dict(other.state_dict())


class PlainOptimizer(Element):
    """The state of an optimizer of a plain model is loaded after the first step."""

    def after_step(self, loop: Loop) -> None:
        if loop.step == 0:
            plain = Loop(loop.recipe, loop.recipe.make(), (), loop.compile_other)
            plain.new_optimizer()
            plain.loss(*batch_of(loop.recipe.net, 4, 3)).backward()
            plain.optimizer.step()
            loop.optimizer.load_state_dict(plain.optimizer.state_dict())


class Schedule(Element):
    """A schedule of the learning rate."""

    def before_training(self, loop: Loop) -> None:
        self.schedule: Any = None

    def after_step(self, loop: Loop) -> None:
        if self.schedule is None:
            self.schedule = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1, 0.5)
        self.schedule.step()


class NewOptimizer(Element):
    """Another optimizer from the second step on."""

    def after_step(self, loop: Loop) -> None:
        if loop.step == 0:
            loop.new_optimizer()


class TwoOptimizers(Element):
    """Two optimizers, of two parts of the model."""

    def before_training(self, loop: Loop) -> None:
        self.second: Any = None

    def gradients(self, loop: Loop) -> None:
        if self.second is None:
            parameters = list(loop.model.parameters())
            half = len(parameters) // 2
            loop.optimizer = torch.optim.SGD(parameters[:half], lr=0.05)
            self.second = torch.optim.SGD(parameters[half:], lr=0.02)
        self.second.step()
        self.second.zero_grad()


class EvalMode(Element):
    """The model trains in evaluation mode, as a fine-tuned one with fixed statistics."""

    def before_training(self, loop: Loop) -> None:
        loop.model.eval()


class SlopeOfFunction(Element):
    """The backward of a Function reads an attribute that the loop sets before each call."""

    traits = ("function",)

    def batch(self, loop: Loop, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loop.model.slope = 1.0 + 0.5 * loop.step
        return x, y


class SlopeOfHook(SlopeOfFunction):
    """A hook that forward adds to a tensor reads such an attribute."""

    traits = ("hook",)


class LateGroup(Element):
    """The first layer is trained from the second step on, as a group of its own."""

    def before_training(self, loop: Loop) -> None:
        loop.model.stem.requires_grad_(False)

    def after_step(self, loop: Loop) -> None:
        if loop.step == 0:
            loop.model.stem.requires_grad_(True)
            loop.optimizer.add_param_group({"params": loop.model.stem.parameters(), "lr": 0.01})


ELEMENTS: dict[str, type[Element]] = {
    "evaluate_first": EvaluateFirst,
    "evaluate_between": EvaluateBetween,
    "inference": Inference,
    "state_reloaded": StateReloaded,
    "plain_state": PlainState,
    "plain_optimizer": PlainOptimizer,
    "schedule": Schedule,
    "new_optimizer": NewOptimizer,
    "two_optimizers": TwoOptimizers,
    "eval_mode": EvalMode,
    "slope_of_function": SlopeOfFunction,
    "slope_of_hook": SlopeOfHook,
    "late_group": LateGroup,
}
