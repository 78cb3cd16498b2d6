"""Gradients that are differentiated again."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.loops.loop import Element, Loop


class SlopeOfNormOne(Element):
    """WGAN-GP: the slope at points between two batches has the norm 1 in every row."""

    is_global = True

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        between = (0.7 * x + 0.3 * x.flip(0)).requires_grad_()
        loss = loop.loss(between, y)
        (slope,) = torch.autograd.grad(len(x) * loss, between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        loop.observe(penalty)
        (loop.loss(x, y) + penalty).backward()
        return True


class SlopeAtData(Element):
    """R1: a loss, then a penalty on the slope of another call, backpropagated apart."""

    is_global = True

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        loop.loss(x, y).backward()
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loop.loss(x, y), x, create_graph=True)
        (10 * slope.square().flatten(1).sum(1).mean()).backward()
        return True


class Curvature(Element):
    """A PINN: first and second derivatives by inputs are in the loss."""

    is_global = True

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        x = x.clone().requires_grad_()
        loss = loop.loss(x, y)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first[..., 0].sum(), x, create_graph=True)
        residual = (second[..., 0] + first[..., 1]).square().mean()
        loop.observe(residual)
        (loss + residual).backward()
        return True


class ParameterSlopes(Element):
    """A penalty on the gradients of all parameters."""

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        loss = loop.loss(x, y)
        parameters = [p for p in loop.model.parameters() if p.requires_grad]
        slopes = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        penalty = torch.stack([s.square().sum() for s in slopes if s is not None]).sum()
        loop.observe(penalty)
        (loss + 0.1 * penalty).backward()
        return True


class AdaptedLoss(Element):
    """MAML: the loss after one inner step, by its gradient through the step."""

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        slow = {n: p for n, p in loop.model.named_parameters() if p.requires_grad}
        slopes = torch.autograd.grad(
            loop.loss(x, y), list(slow.values()), create_graph=True, allow_unused=True
        )
        pairs = zip(slow.items(), slopes, strict=True)
        fast = {n: p if slope is None else p - 0.1 * slope for (n, p), slope in pairs}
        adapted = torch.func.functional_call(loop.model, fast, (0.9 * x, y))
        loss = loop.loss_of(adapted, y)
        loop.observe(loss)
        loss.backward()
        return True


class CurvatureOfParameters(Element):
    """Products of the Hessian with the gradient precondition the step."""

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        parameters = [p for p in loop.model.parameters() if p.requires_grad]
        loss = loop.loss(x, y)
        slopes = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        used = [(p, s) for p, s in zip(parameters, slopes, strict=True) if s is not None]
        products = torch.autograd.grad(
            [s for _, s in used],
            [p for p, _ in used],
            [s.detach() for _, s in used],
            allow_unused=True,
        )
        for (parameter, slope), product in zip(used, products, strict=True):
            parameter.grad = slope.detach() if product is None else slope.detach() - 0.1 * product
        return True


ELEMENTS = {
    "slope_of_norm_one": SlopeOfNormOne,
    "slope_at_data": SlopeAtData,
    "curvature": Curvature,
    "slopes_of_parameters": ParameterSlopes,
    "adapted_loss": AdaptedLoss,
    "curvature_of_parameters": CurvatureOfParameters,
}
