"""`Protocol`: ranks agree on every call and backward of a module before it communicates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar._torch import pytree
from autopar.errors import AutoparError
from autopar.runtime.agreement.call_state import CallState
from autopar.runtime.agreement.channel import Channel, channel
from autopar.runtime.agreement.optimizer_steps import OptimizerSteps
from autopar.runtime.agreement.record import Entry
from autopar.runtime.agreement.replicas import Replicas, check_samples


@dataclass
class Protocol:
    """Exchanges of a module with the other ranks.

    Attributes:
        name: name of the module in errors.
        channel: channel to the other ranks.
        num_calls: number of calls so far.
        optimizer_steps: optimizer steps since the last call.
    """

    name: str
    channel: Channel
    num_calls: int = 0
    optimizer_steps: OptimizerSteps = field(default_factory=OptimizerSteps)

    @staticmethod
    def of(model: nn.Module) -> Protocol | None:
        """The protocol of a new module, None for one rank."""
        opened = channel()
        if opened is None:
            return None
        opened.num_modules += 1
        number = f" (module {opened.num_modules})" if opened.num_modules > 1 else ""
        return Protocol(type(model).__name__ + number, opened)

    @contextlib.contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Reports an error of this rank before a call to the other ranks.

        Raises:
            DisagreementError: another rank has no error.
        """
        try:
            yield
        except Exception as error:
            with contextlib.suppress(AutoparError):  # this rank's own error says more
                self.channel.exchange(
                    f"calls {self.name} and raises {type(error).__name__}: {error}"
                )
            raise

    def agree_on_call(self, state: CallState, replicas: Replicas) -> int:
        """Starts the exchange about a call; `finish_exchange` finishes it.

        Args:
            state: state of this rank.
            replicas: parameters and buffers; each call compares some of them.

        Returns:
            The number of the call, from 1.

        Raises:
            DisagreementError: the ranks make different calls, or their replicas differ.
            BatchError: ranks brought different numbers of rows under batch="local".
        """
        own = replicas.samples(self.num_calls) if torch.is_grad_enabled() else []
        number = self.num_calls + 1
        self.channel.start_exchange(
            f"calls {self.name}",
            state.entries(number, self.optimizer_steps),
            samples=[number for sample in own for number in sample.numbers],
            then=lambda exchanged: check_samples(exchanged.samples, own),
        )
        self.num_calls = number
        return number

    def agree_on_backward(
        self, result: Any, number: int, *, compares_scale: bool, finishes: bool
    ) -> None:
        """Registers a hook that agrees on each backward through the result of a call, as it begins.

        Args:
            result: result of the call.
            number: number of the call.
            compares_scale: whether gradients of a scalar loss must be equal.
            finishes: whether the backward itself finishes the exchange.
        """
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        outputs = [x for x in outputs if x.requires_grad and x.grad_fn is not None]
        if not outputs:
            return
        event = f"runs backward through call {number} of {self.name}"

        def on_backward(gradient: torch.Tensor | None) -> None:
            # the gradient is None if another output receives it
            scale = _loss_scale(gradient) if compares_scale else ""
            advice = "Scale the loss alike on every rank: it is that of the global batch."
            entry = Entry("enter with another gradient", scale, advice=advice)
            self.channel.start_exchange(event, [entry])
            if not finishes:
                self.channel.finish_exchange()

        torch.autograd.graph.register_multi_grad_hook(outputs, on_backward, mode="any")

    def agree_on_clipping(self, max_norm: float, norm_type: float) -> None:
        """Agrees on the arguments of gradient clipping."""
        advice = "Give clip_grad_norm_ the same arguments on every rank."
        values = f"max_norm={float(max_norm)}, norm_type={float(norm_type)}"
        self.channel.exchange(
            f"clips gradients of {self.name}",
            [Entry("clip to another norm", values, advice=advice)],
        )

    def agree_on_state_dict(self) -> None:
        """Agrees on a state dict that needs all ranks."""
        event = f"takes the state dict of {self.name}, whose stages are on several ranks"
        self.channel.exchange(event)


def _loss_scale(gradient: torch.Tensor | None) -> str:
    """The gradient of a loss as text; "" unless it is a scalar on the CPU."""
    if gradient is None or gradient.dim() or gradient.device.type != "cpu":
        return ""
    return repr(gradient.item())
