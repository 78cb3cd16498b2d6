"""Inputs with gradients, other modules beside the model, and Python state."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loops import models
from benchmarks.loops.loop import Element, Loop
from benchmarks.loops.models import OUTPUTS, WIDTH


class InputGradient(Element):
    """Gradients of inputs are read."""

    is_global = True

    def batch(self, loop: Loop, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.x = x.requires_grad_()
        return x, y

    def gradients(self, loop: Loop) -> None:
        gradient = self.x.grad  # None after a backward by parameters alone
        loop.observe(torch.tensor(-1.0) if gradient is None else gradient.square().sum())


class SignAttack(Element):
    """A second batch, moved along the sign of the gradient of the first."""

    is_global = True

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loop.loss(x, y), x)
        moved = (x + 0.1 * torch.tanh(100 * gradient)).detach()
        loop.loss(moved, y).backward()
        return True


class GradientPenalty(Element):
    """The norm of the gradient of inputs is part of the loss."""

    is_global = True

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        x = x.clone().requires_grad_()
        loss = loop.loss(x, y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + 0.1 * gradient.square().sum()).backward()
        return True


class HeadOutside(Element):
    """A head in the loop reads the rows of the model, and trains with it."""

    forms = ("rows",)
    is_global = True

    def before_training(self, loop: Loop) -> None:
        torch.manual_seed(3)
        self.head = nn.Linear(OUTPUTS, OUTPUTS, dtype=loop.recipe.dtype)
        loop.others += list(self.head.parameters())

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        loss = loop.loss_of(self.head(loop.model(x, y)), y)
        loop.observe(loss)
        loss.backward()
        return True

    def after_training(self, loop: Loop) -> None:
        loop.observe(self.head.weight.square().sum())


class StemOutside(Element):
    """A layer in the loop makes the model's inputs, and trains with it."""

    is_global = True

    def before_training(self, loop: Loop) -> None:
        torch.manual_seed(3)
        self.stem = nn.Linear(WIDTH, WIDTH, dtype=loop.recipe.dtype)
        loop.others += list(self.stem.parameters())

    def batch(self, loop: Loop, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.stem(x), y

    def after_training(self, loop: Loop) -> None:
        loop.observe(self.stem.weight.square().sum())


class TwoModels(Element):
    """A second compiled model makes the inputs of the first."""

    is_global = True

    def before_training(self, loop: Loop) -> None:
        torch.manual_seed(4)
        first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.first = loop.compile_other(first.to(loop.recipe.dtype))
        loop.others += list(self.first.parameters())

    def batch(self, loop: Loop, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), y

    def after_training(self, loop: Loop) -> None:
        for value in self.first.state_dict().values():
            loop.observe(value.square().sum())


class DetachedRows(Element):
    """Statistics of the rows beside the loss are read."""

    forms = ("tuple", "dict")
    is_global = True

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        result = loop.model(x, y)
        rows = result[1] if isinstance(result, tuple) else result["rows"]
        loop.observe(rows.detach().std())
        loop.observe((rows.argmax(-1) == y.argmax(-1)).double().mean())
        loop.loss_of(result, y).backward()
        return True


class RowsInLoss(Element):
    """The rows beside the loss are part of what is differentiated."""

    forms = ("tuple", "dict")
    is_global = True

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        result = loop.model(x, y)
        rows = result[1] if isinstance(result, tuple) else result["rows"]
        loss = loop.loss_of(result, y) + rows.var(0, correction=0).sum()
        loop.observe(loss)
        loss.backward()
        return True


class Attribute(Element):
    """An attribute that forward reads changes."""

    traits = ("attribute",)

    def after_step(self, loop: Loop) -> None:
        loop.model.scale = 1.0 / (loop.step + 2)


class Global(Element):
    """A global that a function below forward reads changes."""

    traits = ("global",)

    def __init__(self) -> None:
        models.factor = 1.0  # before other elements call the model

    def after_step(self, loop: Loop) -> None:
        models.factor = 1.0 / (loop.step + 2)


class Environment(Element):
    """A variable of the environment that a function below forward reads changes."""

    traits = ("environment",)

    def __init__(self) -> None:
        os.environ.pop("LOOPS_SCALE", None)  # before other elements call the model

    def after_step(self, loop: Loop) -> None:
        os.environ["LOOPS_SCALE"] = str(1.0 / (loop.step + 2))

    def after_training(self, loop: Loop) -> None:
        os.environ.pop("LOOPS_SCALE", None)


class Extra(Element):
    """A tensor of the model that is no parameter has a gradient, and is trained by hand."""

    traits = ("extra",)

    def gradients(self, loop: Loop) -> None:
        extra = loop.model.extra
        if extra.grad is not None:
            loop.observe(extra.grad.square().sum())
            with torch.no_grad():
                extra.sub_(extra.grad, alpha=0.05)
            extra.grad = None


class Returned(Element):
    """A parameter that forward returns is part of the loss, by its distance from the same one."""

    traits = ("returned",)
    forms = ("loss",)

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        loss, weight = loop.model(x, y)
        loss = loss + 0.1 * (2 * weight - loop.model.head.weight).square().sum()
        loop.observe(loss)
        loss.backward()
        return True


class Hooked(Element):
    """A hook on a module changes what the module returns."""

    def before_training(self, loop: Loop) -> None:
        loop.model.stem.register_forward_hook(lambda module, args, output: output * 0.9)


class ChangedResult(Element):
    """The loop changes rows in place."""

    forms = ("rows",)
    is_global = True

    def result(self, loop: Loop, result: Any) -> None:
        result /= 2
        result[:, 0] += 0.1


class Autocast(Element):
    """The whole loss is computed under autocast to bfloat16, which leaves float64 alone."""

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loop.loss(x, y)
        loss.backward()
        return True


class LayersBeside(Element):
    """Layers of the model are called by themselves, for a second term of the loss."""

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        loss = loop.loss(x, y)
        h = loop.model.stem(x)
        rows = loop.model.head(h.mean(1) if h.dim() > 2 else h)
        (loss + 0.1 * (rows - y).square().mean()).backward()
        return True


class Checkpointed(Element):
    """Blocks of the model run under reentrant checkpoints."""

    traits = ("checkpoint",)


ELEMENTS: dict[str, type[Element]] = {
    "input_gradient": InputGradient,
    "sign_attack": SignAttack,
    "gradient_penalty": GradientPenalty,
    "head_outside": HeadOutside,
    "stem_outside": StemOutside,
    "two_models": TwoModels,
    "detached_rows": DetachedRows,
    "rows_in_loss": RowsInLoss,
    "attribute": Attribute,
    "global": Global,
    "environment": Environment,
    "extra": Extra,
    "returned": Returned,
    "hooked": Hooked,
    "changed_result": ChangedResult,
    "autocast": Autocast,
    "layers_beside": LayersBeside,
    "checkpointed": Checkpointed,
}
