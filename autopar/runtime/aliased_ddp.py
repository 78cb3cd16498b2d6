"""`AliasedDDP`: DDP for a model whose parameters are replicated DTensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autopar.runtime.parameters.distribute import local_part


def with_ddp(model: nn.Module) -> DistributedDataParallel:
    """DDP that allows unused parameters."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)


class AliasedDDP(nn.Module):
    """DDP over plain parameters that alias the memory of replicated DTensors.

    An optimizer of the DTensors keeps working: it updates the same memory, and finds the reduced
    gradients in their `.grad`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        aliases: dict[int, nn.Parameter] = {}
        self.slots: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                alias = aliases.setdefault(
                    id(parameter),
                    nn.Parameter(
                        local_part(parameter.detach()), requires_grad=parameter.requires_grad
                    ),
                )
                self.slots.append((module, name, parameter, alias))
        self.parameter_of = {id(alias): parameter for _, _, parameter, alias in self.slots}
        self.used: set[int] = set()
        self.has_unreduced = self.inside_no_sync = False
        for alias in aliases.values():
            if alias.requires_grad:
                alias.register_post_accumulate_grad_hook(lambda tensor: self.used.add(id(tensor)))
        with self._aliased():
            self.ddp = with_ddp(_Submodule(model))
        # DDP checks annotations of hooks; a lambda has none
        self.ddp.register_comm_hook(None, lambda _, bucket: self._reduce_and_share(bucket))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs DDP's forward on the aliases."""
        for _, _, parameter, alias in self.slots:
            if parameter.grad is None and not self.has_unreduced:
                alias.grad = None
        self.has_unreduced = self.has_unreduced or self.inside_no_sync
        with self._aliased():
            return self.ddp(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """DDP's no_sync; the aliases keep the unreduced gradients."""
        self.inside_no_sync = True
        try:
            with self.ddp.no_sync():
                yield
        finally:
            self.inside_no_sync = False

    @contextlib.contextmanager
    def _aliased(self) -> Iterator[None]:
        """Puts the aliases into their modules."""
        for module, name, _, alias in self.slots:
            module._parameters[name] = alias
        try:
            yield
        finally:
            for module, name, parameter, _ in self.slots:
                module._parameters[name] = parameter

    def _reduce_and_share(self, bucket: Any) -> Any:
        """Averages gradients over ranks as DDP does, and assigns the results to the DTensors.

        Leaves the gradient of a parameter unchanged if no rank used the parameter.
        """
        self.has_unreduced = False
        aliases = bucket.parameters()
        used = torch.tensor([id(alias) in self.used for alias in aliases], dtype=torch.uint8)
        used = used.to(bucket.buffer().device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        for alias, gradient, is_used in zip(
            aliases, bucket.gradients(), used.tolist(), strict=True
        ):
            self.used.discard(id(alias))
            parameter = self.parameter_of[id(alias)]
            assert isinstance(parameter, DTensor)
            if is_used:
                parameter.grad = DTensor.from_local(
                    gradient, parameter.device_mesh, parameter.placements, run_check=False
                )
        group = dist.group.WORLD
        assert group is not None
        return allreduce_hook(group, bucket)


class _Submodule(nn.Module):
    """A module around a model, so that DDP reads the model's current parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)
