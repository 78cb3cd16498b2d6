"""Reads and edits of gradients between backward and step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loops.loop import Element, Loop


def with_gradients(loop: Loop) -> list[nn.Parameter]:
    """The parameters that have gradients."""
    return [p for p in loop.model.parameters() if p.grad is not None]


class ClipNorm(Element):
    """torch's `clip_grad_norm_`."""

    def gradients(self, loop: Loop) -> None:
        loop.observe(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1))


class ClipNormOfModel(Element):
    """The model's `clip_grad_norm_`, which a plain model lacks."""

    def gradients(self, loop: Loop) -> None:
        clip = getattr(loop.model, "clip_grad_norm_", None)
        if clip is None:
            loop.observe(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1))
        else:
            loop.observe(clip(0.1))


class ClipValue(Element):
    """torch's `clip_grad_value_`."""

    def gradients(self, loop: Loop) -> None:
        nn.utils.clip_grad_value_(loop.model.parameters(), 0.01)


class NormItem(Element):
    """Each gradient is scaled by a Python number, its own norm."""

    def gradients(self, loop: Loop) -> None:
        for parameter in with_gradients(loop):
            assert parameter.grad is not None
            norm = parameter.grad.norm().item()
            parameter.grad.mul_(1 / (1 + norm))


class LargestItem(Element):
    """A Python number from the largest gradient scales all."""

    def gradients(self, loop: Loop) -> None:
        grads: list[Any] = [p.grad for p in with_gradients(loop)]
        largest = max(float(g.abs().max()) for g in grads)
        loop.observe(largest)
        for grad in grads:
            grad.div_(1 + largest)


class Noise(Element):
    """Seeded noise is added."""

    def gradients(self, loop: Loop) -> None:
        torch.manual_seed(loop.step)
        for parameter in with_gradients(loop):
            assert parameter.grad is not None
            parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)


class FirstRowZero(Element):
    """The first row of each gradient is set to zero."""

    def gradients(self, loop: Loop) -> None:
        for parameter in with_gradients(loop):
            assert parameter.grad is not None
            parameter.grad[0] = 0.0


class Centred(Element):
    """Each gradient's mean is taken off."""

    def gradients(self, loop: Loop) -> None:
        for parameter in with_gradients(loop):
            assert parameter.grad is not None
            parameter.grad = parameter.grad - parameter.grad.mean()


class SmallDropped(Element):
    """Gradients below a threshold of the whole are dropped by a boolean index."""

    def gradients(self, loop: Loop) -> None:
        for parameter in with_gradients(loop):
            assert parameter.grad is not None
            parameter.grad[parameter.grad.abs() < 0.01] = 0.0


class Hook(Element):
    """Hooks on parameters scale gradients."""

    def before_training(self, loop: Loop) -> None:
        for parameter in loop.model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)


class NormHook(Element):
    """Hooks on parameters divide each gradient by its norm."""

    def before_training(self, loop: Loop) -> None:
        for parameter in loop.model.parameters():
            parameter.register_hook(lambda gradient: gradient / (1 + gradient.norm()))


class PostHook(Element):
    """Hooks behind accumulation clip gradients."""

    def before_training(self, loop: Loop) -> None:
        def clip(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.clamp_(-0.02, 0.02)

        for parameter in loop.model.parameters():
            parameter.register_post_accumulate_grad_hook(clip)


ELEMENTS: dict[str, type[Element]] = {
    "clip_norm": ClipNorm,
    "clip_norm_of_model": ClipNormOfModel,
    "clip_value": ClipValue,
    "norm_item": NormItem,
    "largest_item": LargestItem,
    "noise": Noise,
    "first_row_zero": FirstRowZero,
    "centred": Centred,
    "small_dropped": SmallDropped,
    "hook": Hook,
    "norm_hook": NormHook,
    "post_hook": PostHook,
}
