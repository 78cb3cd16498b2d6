"""`WholeParameters`: an optimizer over whole copies of the parameters of a sharded model.

Optimizers that read whole matrices (norms of a layer, Newton-Schulz, preconditioners) or flatten
all parameters fail on shards, or round otherwise. Here each rank steps the whole model alike, and
keeps its part of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from autopar.runtime.agreement.consensus import gather_objects, is_multi_rank
from autopar.runtime.border.closures import closure_of, with_closure
from autopar.runtime.parameters.distribute import distribute_like, is_remote, local_part
from autopar.runtime.parameters.strided_shard import whole_tensor
from autopar.runtime.process_groups import explaining_comm_errors

ReadValues = Callable[[], Mapping[nn.Parameter, torch.Tensor]]
"""Whole values of all parameters; all ranks call it at once."""


@dataclass(frozen=True)
class WholeParameters:
    """Whole copies of the parameters of a model, which an optimizer steps.

    Attributes:
        copies: copy of each parameter.
        read_values: gathers the values of all parameters.
        stages: process group of the pipeline, None without one.
    """

    copies: Mapping[nn.Parameter, nn.Parameter]
    read_values: ReadValues
    stages: Callable[[], dist.ProcessGroup | None]

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes steps of an optimizer of the copies read the gradients and write the values."""
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self.write())
        zero_copies = optimizer.zero_grad
        optimizer.zero_grad = partial(self._zero_grad, zero_copies)  # type: ignore[method-assign]

    def read(self) -> None:
        """Gathers all values and gradients into the copies; all ranks call this at once."""
        with torch.no_grad(), explaining_comm_errors("an optimizer's step"):
            for parameter, value in self.read_values().items():
                self.copies[parameter].copy_(value)
            self._read_gradients()

    def write(self) -> None:
        """Writes this rank's parts of the copies into the parameters."""
        with torch.no_grad():
            for parameter, copy in self.copies.items():
                if not is_remote(parameter):
                    parameter.copy_(distribute_like(parameter, copy.detach()))

    def _read_gradients(self) -> None:
        owners = self._owners_of_gradients()
        stages = self.stages()
        for index, (parameter, copy) in enumerate(self.copies.items()):
            if index not in owners:
                copy.grad = None
                continue
            if parameter.grad is not None and not is_remote(parameter):
                gradient = whole_tensor(parameter.grad.detach()).contiguous()
            else:
                gradient = torch.empty_like(copy)
            if stages is not None:
                # A broadcast into the gradient itself could overwrite the parameter's `.grad`.
                gradient = gradient.clone()
                dist.broadcast(gradient, group=stages, group_src=owners[index])
            copy.grad = gradient.to(copy)

    def _owners_of_gradients(self) -> dict[int, int]:
        """The place along the pipeline of a rank with each gradient, by index of the parameter."""
        local = ((i, p) for i, p in enumerate(self.copies) if not is_remote(p))
        indices = [i for i, parameter in local if parameter.grad is not None]
        stages = self.stages()
        if stages is None or not is_multi_rank():
            return dict.fromkeys(indices, 0)
        gathered, found = gather_objects(indices), dict[int, int]()
        for place, rank in enumerate(dist.get_process_group_ranks(stages)):
            found |= {index: place for index in gathered[rank] if index not in found}
        return dict(sorted(found.items()))

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Reads values and gradients; a closure is evaluated at the values of the copies."""
        self.read()
        closure = closure_of(args, kwargs)
        if closure is None:
            return None
        return with_closure(args, kwargs, partial(self._evaluate, closure))

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """The result of a closure at the values of the copies, whose gradients follow."""
        self.write()
        with torch.enable_grad():
            result = closure()
        self.read()
        return result

    def _zero_grad(self, zero_copies: Callable[..., None], set_to_none: bool = True) -> None:
        zero_copies(set_to_none)
        for parameter in self.copies:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                local_part(parameter.grad).zero_()
