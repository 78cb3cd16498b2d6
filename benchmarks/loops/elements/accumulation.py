"""Ways to get from losses to gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from benchmarks.loops.loop import Element, Loop


def without_sync(model: Any) -> Any:
    """The model's `no_sync`, which a plain model lacks."""
    return getattr(model, "no_sync", contextlib.nullcontext)()


class Accumulate(Element):
    """Two backward passes a step."""

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        for _ in range(2):
            (loop.loss(x, y) / 2).backward()
            x = x * 0.5
        return True


class NoSync(Element):
    """Two backward passes a step, the first under `no_sync`."""

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        with without_sync(loop.model):
            (loop.loss(x, y) / 2).backward()
        (loop.loss(x * 0.5, y) / 2).backward()
        return True


class Discarded(Element):
    """A backward pass under `no_sync` that gives NaN, and is discarded."""

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        with without_sync(loop.model):
            (loop.loss(x, y) * float("nan")).backward()
        loop.values.pop()
        if loop.step % 2:
            loop.optimizer.zero_grad()
        else:
            loop.model.zero_grad(set_to_none=False)
        loop.loss(x, y).backward()
        return True


class Leftover(Element):
    """The last step's gradients all come from `no_sync`."""

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        last = loop.step == len(loop.recipe.rows) - 1
        with without_sync(loop.model) if last else contextlib.nullcontext():
            loop.loss(x, y).backward()
        return True


class Retain(Element):
    """The graph of one forward is differentiated twice."""

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        loss = loop.loss(x, y)
        loss.backward(retain_graph=True)
        (loss / 4).backward()
        return True


class OfSome(Element):
    """`backward(inputs=)` names some of the parameters."""

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        some = [p for name, p in loop.model.named_parameters() if "bias" not in name]
        loop.loss(x, y).backward(inputs=some)
        return True


class Functional(Element):
    """`torch.autograd.grad`, whose results become the gradients.

    They are copied: torch gives parameters of a sum one tensor, which clipping would scale twice.
    """

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        trained = [p for p in loop.model.parameters() if p.requires_grad]
        found = torch.autograd.grad(loop.loss(x, y), trained, allow_unused=True)
        for parameter, gradient in zip(trained, found, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        return True


class OneOfTwo(Element):
    """Two losses come back, and the first alone is differentiated."""

    forms = ("losses",)

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        first, _ = loop.model(x, y)
        loop.observe(first)
        first.backward()
        for name, parameter in loop.model.named_parameters():
            if parameter.grad is None:
                loop.observe(len(name))
        return True


class BothInTurn(Element):
    """Two losses come back, and are differentiated one after the other."""

    forms = ("losses",)

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        first, second = loop.model(x, y)
        first.backward(retain_graph=True)
        loop.observe(first)
        (second * 0.3).backward()
        return True


class Skipped(Element):
    """A step whose loss is not differentiated."""

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        loss = loop.loss(x, y)
        if loop.step != 1:
            loss.backward()
        return True


class Checkpointed(Element):
    """The model runs under `torch.utils.checkpoint`."""

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        from torch.utils.checkpoint import checkpoint

        result = checkpoint(loop.model, x, y, use_reentrant=False)
        loss = loop.loss_of(result, y)
        loop.observe(loss)
        loss.backward()
        return True


ELEMENTS: dict[str, type[Element]] = {
    "accumulate": Accumulate,
    "no_sync": NoSync,
    "discarded": Discarded,
    "leftover": Leftover,
    "retain": Retain,
    "of_some": OfSome,
    "functional": Functional,
    "one_of_two": OneOfTwo,
    "both_in_turn": BothInTurn,
    "skipped": Skipped,
    "checkpointed": Checkpointed,
}
