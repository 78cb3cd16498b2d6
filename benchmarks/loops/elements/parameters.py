"""Reads, writes and penalties of parameters in the loop."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loops.loop import Element, Loop


class L2(Element):
    """A penalty on the squares of parameters."""

    def penalty(self, loop: Loop) -> Tensor:
        return 0.01 * sum((p.square().sum() for p in loop.model.parameters()), torch.zeros(()))


class PenaltyFirst(Element):
    """A penalty is backpropagated before the model is called."""

    def batch(self, loop: Loop, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        (0.01 * sum(p.square().sum() for p in loop.model.parameters())).backward()
        return x, y


class Probed(Element):
    """Gradients of a trial backward before the first step are discarded, and their sum kept."""

    def before_training(self, loop: Loop) -> None:
        total = sum(p.sum() for p in loop.model.parameters())
        total.backward()
        loop.observe(sum(p.grad.sum() for p in loop.model.parameters() if p.grad is not None))
        loop.model.zero_grad()
        self.first = total


class Norms(Element):
    """A penalty on the norms of matrices."""

    def penalty(self, loop: Loop) -> Tensor:
        matrices = [p for p in loop.model.parameters() if p.dim() > 1]
        return 0.01 * torch.stack([p.norm() for p in matrices]).sum()


class Anchored(Element):
    """A penalty on the distance from the first values, as for elastic weights."""

    def before_training(self, loop: Loop) -> None:
        self.anchors = [p.detach().clone() for p in loop.model.parameters()]

    def penalty(self, loop: Loop) -> Tensor | None:
        pairs = zip(loop.model.parameters(), self.anchors, strict=True)
        total: Any = sum((p - a).square().sum() for p, a in pairs)
        return total if isinstance(total, Tensor) else None


class Decay(Element):
    """Parameters are scaled in place."""

    def after_step(self, loop: Loop) -> None:
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.mul_(0.9)


class DataDecay(Element):
    """`.data` is scaled in place."""

    def after_step(self, loop: Loop) -> None:
        for parameter in loop.model.parameters():
            parameter.data.mul_(0.9)


class DataAssigned(Element):
    """`.data` is assigned."""

    def after_step(self, loop: Loop) -> None:
        for parameter in loop.model.parameters():
            parameter.data = parameter.data * 0.9


class Clamped(Element):
    """Parameters are clamped."""

    def after_step(self, loop: Loop) -> None:
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.clamp_(-0.2, 0.2)


class FirstRow(Element):
    """The first row of each parameter is set."""

    def after_step(self, loop: Loop) -> None:
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter[0] = 0.1


class Masked(Element):
    """Small weights are set to zero by a boolean index."""

    def after_step(self, loop: Loop) -> None:
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter[parameter.abs() < 0.05] = 0.0


class Perturbed(Element):
    """Seeded noise is added."""

    def after_step(self, loop: Loop) -> None:
        torch.manual_seed(loop.step)
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


class Normalised(Element):
    """Each matrix is divided by its norm, a Python number."""

    def after_step(self, loop: Loop) -> None:
        with torch.no_grad():
            for parameter in loop.model.parameters():
                if parameter.dim() > 1:
                    parameter.div_(1 + parameter.norm().item())


class Sharpness(Element):
    """Sharpness-aware minimisation: a second gradient at the worst point nearby."""

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        loop.loss(x, y).backward()
        moved = []
        trained = [p for p in loop.model.parameters() if p.grad is not None]
        grads: list[Any] = [p.grad for p in trained]
        norm = torch.stack([g.norm() for g in grads]).norm()
        with torch.no_grad():
            for parameter, gradient in zip(trained, grads, strict=True):
                moved.append(gradient * (0.05 / (norm + 1e-12)))
                parameter.add_(moved[-1])
        loop.optimizer.zero_grad()
        loop.loss(x, y).backward()
        with torch.no_grad():
            for parameter, move in zip(trained, moved, strict=True):
                parameter.sub_(move)
        return True


class Average(Element):
    """A moving average of the parameters, kept in the loop and copied back at the end."""

    def before_training(self, loop: Loop) -> None:
        self.means = [p.detach().clone() for p in loop.model.parameters()]

    def after_step(self, loop: Loop) -> None:
        with torch.no_grad():
            for mean, parameter in zip(self.means, loop.model.parameters(), strict=True):
                mean.lerp_(parameter, 0.3)

    def after_training(self, loop: Loop) -> None:
        with torch.no_grad():
            for mean, parameter in zip(self.means, loop.model.parameters(), strict=True):
                parameter.copy_(mean)


class AverageModel(Element):
    """torch's `AveragedModel`, evaluated at the end."""

    def before_training(self, loop: Loop) -> None:
        self.averaged: Any = None

    def after_step(self, loop: Loop) -> None:
        if self.averaged is None:
            self.averaged = torch.optim.swa_utils.AveragedModel(loop.model)
        else:
            self.averaged.update_parameters(loop.model)

    def after_training(self, loop: Loop) -> None:
        for parameter in self.averaged.parameters():
            loop.observe(parameter.detach().square().sum())


class Copied(Element):
    """A deep copy made before training is evaluated at the end."""

    def before_training(self, loop: Loop) -> None:
        self.copied = copy.deepcopy(loop.model)

    def after_training(self, loop: Loop) -> None:
        for parameter in self.copied.parameters():
            loop.observe(parameter.detach().square().sum())


class Observed(Element):
    """Sums, largest values and single values are read."""

    def after_step(self, loop: Loop) -> None:
        for parameter in loop.model.parameters():
            loop.observe(parameter.detach().abs().sum())
            loop.observe(parameter.detach().max().item())
            loop.observe(parameter.detach().flatten()[0].item())


class Frozen(Element):
    """Biases are frozen after the first step."""

    def after_step(self, loop: Loop) -> None:
        if loop.step == 0:
            for name, parameter in loop.model.named_parameters():
                if name.endswith("bias"):
                    parameter.requires_grad_(False)


class Orthogonal(Element):
    """torch's initialisation, in place, after the first step."""

    def after_step(self, loop: Loop) -> None:
        if loop.step == 0:
            torch.manual_seed(5)
            for parameter in loop.model.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.2)


class Fused(Element):
    """All parameters are views of one tensor, by which the loop changes them."""

    def before_training(self, loop: Loop) -> None:
        parameters, begin = list(loop.model.parameters()), 0
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        for p in parameters:
            p.data = self.flat[begin : begin + p.numel()].view(p.shape)
            begin += p.numel()

    def after_step(self, loop: Loop) -> None:
        self.flat.mul_(0.9)


class AssignedVector(Element):
    """Parameters become parts of a vector that was made of them."""

    def after_step(self, loop: Loop) -> None:
        vector = nn.utils.parameters_to_vector(loop.model.parameters()).detach()
        nn.utils.vector_to_parameters(0.9 * vector, loop.model.parameters())


ELEMENTS: dict[str, type[Element]] = {
    "l2": L2,
    "penalty_first": PenaltyFirst,
    "probed": Probed,
    "norms": Norms,
    "anchored": Anchored,
    "decay": Decay,
    "data_decay": DataDecay,
    "data_assigned": DataAssigned,
    "clamped": Clamped,
    "first_row": FirstRow,
    "masked": Masked,
    "perturbed": Perturbed,
    "normalised": Normalised,
    "sharpness": Sharpness,
    "average": Average,
    "average_model": AverageModel,
    "copied": Copied,
    "observed": Observed,
    "frozen": Frozen,
    "initialised": Orthogonal,
    "fused": Fused,
    "assigned_vector": AssignedVector,
}
