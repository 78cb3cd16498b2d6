"""`Execution`: everything that a compiled model has beside the user's module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from autopar.capture.trace import Capture
from autopar.core.plan.plan import Plan
from autopar.errors import CaptureError
from autopar.runtime.agreement.protocol import Protocol
from autopar.runtime.border.held_gradients import HeldGradients
from autopar.runtime.border.outside_gradients import OutsideGradients
from autopar.runtime.context import ExecutionContext
from autopar.runtime.initialization.deferred import DeferredValues
from autopar.runtime.pipeline.executor import PipelineExecutor
from autopar.runtime.spmd.executor import SpmdExecutor
from autopar.runtime.tracing.argument_values import ArgumentValues
from autopar.runtime.tracing.retracing import Retracing
from autopar.runtime.watch.steps import StepWatch

CaptureFunction = Callable[..., Capture]
"""Captures a rank's call, given model-parallel size, pipeline size and number of micro-batches.

A fourth argument says whether all micro-batches must have as many rows.
"""
MakePlan = Callable[[Any, CaptureFunction, Any], Plan]
"""Plans a call of a `DistributedModule`, given its (args, kwargs) too."""
MakeFallback = Callable[[nn.Module, CaptureError], nn.Module]
"""Wraps a model that cannot be captured."""
CheckCall = Callable[[Any, list[Any], Any], None]
"""Checks a module and the flattened arguments of a call before it runs, or raises."""


@dataclass
class Execution:
    """State of one compiled model; a copy of the model has one of its own.

    It stands in a single attribute, so that all others of the compiled model are the user's.

    Attributes:
        protocol: exchanges with the other ranks; None for one rank.
        check_first_call: runs once, before the first call with gradients.
        executor: runs calls under the plan; None before there is one.
        fallback: wraps a model that cannot be captured; None under a plan.
        deferred: parameters that have no values yet.
        pending_compression_state: state to load as soon as there is a plan.
        holds_gradients: inside of `no_sync`.
        is_gathered: inside of `gathered`.
    """

    context: ExecutionContext
    protocol: Protocol | None
    make_plan: MakePlan
    make_fallback: MakeFallback
    check_first_call: CheckCall | None = None
    executor: SpmdExecutor | PipelineExecutor | None = None
    fallback: nn.Module | None = None
    deferred: DeferredValues | None = None
    pending_compression_state: Mapping[str, Any] | None = None
    watch: StepWatch = field(default_factory=StepWatch)
    retracing: Retracing = field(default_factory=Retracing)
    argument_values: ArgumentValues = field(default_factory=ArgumentValues)
    holds_gradients: bool = False
    is_gathered: bool = False
    was_called: bool = False

    @classmethod
    def of(
        cls, context: ExecutionContext, make_plan: MakePlan, make_fallback: MakeFallback
    ) -> Execution:
        """The execution of a model that has no plan yet."""
        protocol = Protocol.of(context.model)
        if protocol is not None:
            context.turn = protocol.channel.turn
        return cls(context, protocol, make_plan, make_fallback)

    def start(self) -> None:
        """Makes the executor of the plan."""
        plan = self.context.plan
        if plan is not None:
            kind = SpmdExecutor if plan.pipeline is None else PipelineExecutor
            self.executor = kind(self.context)

    def copy_for(self, model: nn.Module, memo: dict[int, Any]) -> Execution:
        """The execution of a copy of the model, under the same plan and with shared programs."""
        context, protocol = self.context, self.protocol
        made = Execution(
            replace(
                context,
                model=model,
                rng=copy.deepcopy(context.rng, memo),
                held_gradients=HeldGradients(),
                outside_gradients=OutsideGradients(),
                compression_state=context.compression_state.copy(),
            ),
            None if protocol is None else protocol.of_copy(),
            self.make_plan,
            self.make_fallback,
            check_first_call=self.check_first_call,
            fallback=copy.deepcopy(self.fallback, memo),
            pending_compression_state=copy.deepcopy(self.pending_compression_state, memo),
            argument_values=ArgumentValues(self.argument_values.are_read),
            holds_gradients=self.holds_gradients,
            is_gathered=self.is_gathered,
            was_called=self.was_called,
        )
        made.context.guards = context.guards.copy_for(model)
        made.start()
        if isinstance(self.executor, SpmdExecutor) and isinstance(made.executor, SpmdExecutor):
            made.executor.programs = self.executor.programs
        return made
