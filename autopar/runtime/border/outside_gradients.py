"""`OutsideGradients`: gradients of parameters that a loop computes beside calls of the model.

    loss = F.cross_entropy(model(x), y) + model.head(features).square().mean()

Under `batch="local"` each rank computes them from its own rows. DistributedDataParallel averages
all that its parameters get, so these are averaged, too. Under "global" they are equal on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._torch import current_backward, local_tensor, queue_callback
from autopar.core.plan.plan import Plan
from autopar.errors import DisagreementError, StrategyError
from autopar.runtime.agreement.channel import channel
from autopar.runtime.agreement.consensus import gather_objects
from autopar.runtime.agreement.replicas import checksum
from autopar.runtime.border.gradient_hooks import hook_tables_of
from autopar.runtime.border.held_gradients import HeldGradient
from autopar.runtime.options import Options
from autopar.runtime.parameters.distribute import accumulator_of
from autopar.runtime.parameters.whole_values import average_of_ranks

_EVENT = "averages gradients that the loop computes beside calls of the model"

Memory = tuple[int, int, int]
"""The backward that made a gradient, the address of its memory and its version."""


@dataclass
class OutsideGradients:
    """Averages gradients over ranks, which all run the same loop.

    Gradients of plain parameters are averaged once a backward is complete. Those of sharded ones,
    and of parameters with hooks, are averaged as they arrive.
    """

    _from_calls: dict[str, Memory] = field(default_factory=dict)
    _pending: dict[str, nn.Parameter] = field(default_factory=dict)
    _hooks: list[tuple[Any, Any]] = field(default_factory=list)  # nodes, kept alive, and handles
    _is_stopped: bool = False

    def watch(
        self, parameters: Mapping[str, nn.Parameter], options: Options, plan: Plan | None
    ) -> None:
        """Averages gradients of these parameters from now on, where the border is DDP's.

        Stages of a pipeline, and groups that step apart, have parameters of their own.
        """
        self._drop_hooks()
        is_apart = plan is not None and (plan.pp_size > 1 or bool(plan.local_steps))
        if options.ranks == 1 or options.batch != "local" or is_apart or self._is_stopped:
            return
        for name, parameter in parameters.items():
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            node = accumulator_of(parameter)
            handle = node.register_prehook(functools.partial(self._before, name, parameter))
            self._hooks.append((node, handle))
        agreement = channel()
        assert agreement is not None
        agreement.averages_gradients = True

    def stop(self) -> None:
        """Leaves gradients to torch's data parallelism."""
        self._drop_hooks()
        self._is_stopped = True

    def _drop_hooks(self) -> None:
        for _, handle in self._hooks:
            handle.remove()
        self._hooks = []

    def from_call(self, name: str, gradient: torch.Tensor | None) -> None:
        """Takes note of the gradient that a call of the model gives a parameter."""
        if self._hooks and gradient is not None:
            self._from_calls[name] = _memory_of(gradient)

    def _before(self, name: str, parameter: nn.Parameter, gradients: Any) -> Any:
        """Sees the gradient that a backward adds to a parameter's."""
        (gradient,) = gradients
        # A call's gradient by itself is averaged already. Its sum with the loop's is averaged
        # whole: the mean leaves the part that is equal on all ranks.
        if gradient is None or self._from_calls.pop(name, None) == _memory_of(gradient):
            return None
        # `ShardedTensor` has averaged its plain addends when autograd summed them.
        if isinstance(gradient, DTensor):
            return None
        # A hook may step by the gradient at once, so the end of the backward is too late.
        if isinstance(parameter, DTensor) or hook_tables_of(parameter):
            average = average_of_ranks(gradient)
            if not gradient.requires_grad:
                return (average,)
            # The loop differentiates it again. Ranks' derivatives are averaged in their turn.
            return (gradient + (average - gradient.detach()),)
        if not self._pending:
            queue_callback(self._average)
        self._pending[name] = parameter
        return None

    def _average(self) -> None:
        """Averages the gradients that differ; of two calls in one backward they do not."""
        pending, self._pending = self._pending, {}
        named = [(name, p) for name, p in sorted(pending.items()) if p.grad is not None]
        gradients = {name: _gradient_of(name, p) for name, p in named}
        sums = {name: checksum(gradient) for name, gradient in gradients.items()}
        of_ranks = gather_objects(sums, _EVENT)
        if any(each.keys() != sums.keys() for each in of_ranks):
            raise DisagreementError(
                "ranks compute gradients of different parameters beside calls of the model: "
                f"{', '.join(sums)} on this rank. All ranks must run the same loop."
            )
        for name, gradient in gradients.items():
            if any(each[name] != sums[name] for each in of_ranks):
                gradient.copy_(average_of_ranks(gradient))


def _gradient_of(name: str, parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    if isinstance(gradient, HeldGradient):
        gradient = gradient.reduced
    assert gradient is not None
    if gradient.layout is not torch.strided:
        raise StrategyError(
            f"the loop computes a sparse gradient of {name} beside calls of the model, which "
            'batch="local" would average over ranks. Make it dense (sparse=False), or compute it '
            "in forward."
        )
    return gradient.detach()


def _memory_of(gradient: torch.Tensor) -> Memory:
    local = local_tensor(gradient) if isinstance(gradient, DTensor) else gradient
    address = local.data_ptr() if local.layout is torch.strided else id(local)
    return current_backward(), address, local._version
