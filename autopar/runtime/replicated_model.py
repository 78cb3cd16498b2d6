"""`ReplicatedModel`: data parallelism of a model whose parameters are replicated DTensors.

A loop and its optimizer have DTensors already where a strategy asked for tp or pp, and the first
call could not be captured. Forward runs on their plain values, which lead back to them in autograd.
So whatever else gives them gradients, penalties in the loop among them, adds to the same ones.
DistributedDataParallel takes leaves alone, and the DTensors would be others.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from autopar._torch import without_weight_references
from autopar.core.common.world import world
from autopar.runtime.border.first_derivative import differentiable_once
from autopar.runtime.border.held_gradients import HeldGradients
from autopar.runtime.parameters.distribute import broadcast_from_rank0, local_part
from autopar.runtime.parameters.sharded import in_layout_of
from autopar.runtime.process_groups import explaining_comm_errors

Gradients = list[torch.Tensor | None]


class ReplicatedModel(nn.Module):
    """Runs a model on its parameters' plain values, and averages gradients over all ranks.

    A parameter that no rank used has no gradient, as under DistributedDataParallel.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.held, self.reduces = HeldGradients(), True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        values = {id(p): local_part(p.detach()) for p in self.model.parameters()}
        if trained and torch.is_grad_enabled():
            ways = _Values.apply(self, tuple(trained), self.reduces, *trained.values())
            values |= zip(map(id, trained.values()), ways, strict=True)
        if self.reduces:
            with explaining_comm_errors("forward"):
                broadcast_from_rank0(self.model.buffers())
        with self._with_values(values):
            return self.model(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Holds back the gradients of calls inside until a call outside."""
        before, self.reduces = self.reduces, False
        try:
            yield
        finally:
            self.reduces = before

    @contextlib.contextmanager
    def _with_values(self, values: dict[int, torch.Tensor]) -> Iterator[None]:
        """Puts values in the places of the parameters with these ids."""
        slots = [
            (module, name, parameter)
            for module in self.model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        with without_weight_references(self.model):
            for module, name, parameter in slots:
                module._parameters[name] = values[id(parameter)]  # type: ignore[assignment]
        try:
            yield
        finally:
            with without_weight_references(self.model):
                for module, name, parameter in slots:
                    module._parameters[name] = parameter

    def average(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], own: Gradients
    ) -> Gradients:
        """The mean over ranks of gradients, with those that were held back; all ranks call this."""
        for place, name in enumerate(names):
            held = self.held.take(name)
            if held is not None:
                gradient = own[place]
                own[place] = held if gradient is None else gradient + held
        device = local_part(parameters[0]).device
        # a branch may use other parameters on each rank, and all ranks must reduce the same buckets
        used = torch.tensor([gradient is not None for gradient in own], dtype=torch.uint8)
        used = used.to(device)
        with explaining_comm_errors("backward"):
            dist.all_reduce(used, dist.ReduceOp.MAX, group=world())
        places = [place for place, is_used in enumerate(used.tolist()) if is_used]
        buckets = defaultdict[torch.dtype, list[int]](list)
        for place in places:
            buckets[parameters[place].dtype].append(place)
        averages: Gradients = [None] * len(names)
        for bucket in buckets.values():
            likes = [local_part(parameters[place].detach()) for place in bucket]
            parts = [
                torch.zeros_like(like) if (gradient := own[place]) is None else gradient
                for place, like in zip(bucket, likes, strict=True)
            ]
            flat = torch.cat([part.reshape(-1) for part in parts])
            with explaining_comm_errors("backward"):
                dist.all_reduce(flat, group=world())
            flat /= dist.get_world_size(world())
            pieces = flat.split([like.numel() for like in likes])
            for place, like, piece in zip(bucket, likes, pieces, strict=True):
                averages[place] = in_layout_of(parameters[place], piece.view(like.shape))
        return averages

    def hold(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], own: Gradients
    ) -> Gradients:
        """Holds gradients back; returns none."""
        for name, parameter, gradient in zip(names, parameters, own, strict=True):
            if gradient is not None:
                self.held.add(name, parameter, gradient)
        return [None] * len(names)


class _Values(torch.autograd.Function):
    """Plain values of parameters; their gradients are averaged, or held back."""

    @staticmethod
    def forward(
        ctx: Any, owner: ReplicatedModel, names: Sequence[str], reduces: bool, *parameters: Any
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.owner, ctx.names, ctx.reduces, ctx.parameters = owner, names, reduces, parameters
        return tuple(local_part(each.detach()).view_as(each) for each in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        owner, differentiates_again = ctx.owner, torch.is_grad_enabled()
        settle = owner.average if ctx.reduces else owner.hold
        with torch.no_grad():
            results = settle(ctx.names, ctx.parameters, list(gradients))
        if differentiates_again:
            reason = "the model could not be captured"
            results = differentiable_once(results, (*ctx.parameters, *gradients), reason)
        return None, None, None, *results
