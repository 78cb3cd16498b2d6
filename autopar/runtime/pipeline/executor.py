"""`PipelineExecutor`: runs calls of a model with pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd, isfinite
from typing import Any

import torch
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from autopar._torch import backward_keeps_graph
from autopar.capture.call import BatchShard
from autopar.common.notices import warn_of_numerics
from autopar.errors import CoupledRowsError
from autopar.ir.roles import Differentiable, Input, Parameter
from autopar.report.plan import Plan
from autopar.runtime.context import ExecutionContext
from autopar.runtime.pipeline.call import PipelineCall
from autopar.runtime.pipeline.compiled_call import CompiledPipelineCall
from autopar.runtime.pipeline.stage_parameters import (
    apply_requires_grad_flags,
    requires_grad_flags,
)
from autopar.runtime.pipeline.stage_program import build_pipeline_program
from autopar.runtime.process_groups import explaining_comm_errors, rank
from autopar.runtime.written import result_of


@dataclass
class PipelineExecutor:
    """Runs calls of a module whose plan has pipeline stages.

    Attributes:
        context: state shared by all calls.
        compiled_calls: stages and schedules of each kind of call.
        coupled_keys: kinds of calls whose micro-batches need each other's rows.
        loss_tangent: gradient of the previous loss.
    """

    context: ExecutionContext
    compiled_calls: dict[Any, CompiledPipelineCall] = field(default_factory=dict)
    coupled_keys: set[Any] = field(default_factory=set)
    loss_tangent: float = 1.0

    @property
    def plan(self) -> Plan:
        """The plan."""
        assert self.context.plan is not None
        return self.context.plan

    def run(self, leaves: Sequence[Any], shard: BatchShard, no_sync: bool) -> Any:
        """Runs a call and returns its result, which is the same along the pipeline.

        Args:
            leaves: flattened arguments.
            shard: this rank's rows of the arguments.
            no_sync: whether gradients stay unreduced.
        """
        self._sync_requires_grad()
        context = self.context
        call = self._call(self._micro_batches(shard), no_sync)
        program = call.compiled.program
        with context.rng.as_default(program.is_random), context.without_autocast():
            if program.differentiates:
                roles, tensors = context.differentiable_inputs(shard)
                tensors.append(torch.zeros((), requires_grad=True))  # this rank may train nothing
                state = context.guards.state
                outputs = _PipelineFunction.apply(_AutogradCall(self, call, roles, state), *tensors)
            else:
                outputs = call.run_forward()
        context.write_buffers(call.updates, program.capture.rebound_buffers)
        result = list(program.capture.leaves)
        for index, value in zip(call.returned, outputs, strict=True):
            result[index] = value
        return result_of(program.capture, result, context.model)

    def _sync_requires_grad(self) -> None:
        """Copies `requires_grad` of remote parameters from the ranks that hold them."""
        ranks, device = self.plan.world_size, self.context.device
        parameters = self.context.index.parameters.values()
        if ranks == 1 or not parameters:
            return
        leads_stage = rank() % (ranks // self.plan.pp_size) == 0
        flags = torch.tensor(requires_grad_flags(parameters, reports=leads_stage), device=device)
        with explaining_comm_errors("a pipeline"):
            dist.all_reduce(flags)
        apply_requires_grad_flags(parameters, flags.tolist())

    def _micro_batches(self, shard: BatchShard) -> list[BatchShard]:
        """The micro-batches of a shard; the whole shard if they need each other's rows."""
        micro_batches = shard.split_micro_batches(self._num_micro_batches(shard))
        key = (self.context.call_key(micro_batches[0]), torch.is_grad_enabled())
        if len(micro_batches) > 1 and key not in self.coupled_keys:
            try:
                self.context.capture(micro_batches[0])
            except CoupledRowsError:
                self.coupled_keys.add(key)
        return [shard] if key in self.coupled_keys else micro_batches

    def _num_micro_batches(self, shard: BatchShard) -> int:
        """The planned number, or a divisor of it for smaller batches."""
        assert self.plan.pipeline is not None
        planned, rows = self.plan.pipeline.micro_batches, shard.rows
        if rows * shard.num_slices != shard.global_rows:
            return 1
        return gcd(planned, rows) if rows < self.plan.pipeline.rows else planned

    def _call(self, micro_batches: list[BatchShard], no_sync: bool) -> PipelineCall:
        compiled = self._compiled_call(micro_batches[0], len(micro_batches), no_sync)
        return PipelineCall(compiled, self.context, micro_batches, no_sync, self.loss_tangent)

    def _compiled_call(
        self, micro_batch: BatchShard, count: int, no_sync: bool
    ) -> CompiledPipelineCall:
        """The stages and schedules for calls of `count` micro-batches like this one."""
        context = self.context
        unreduced = () if no_sync else tuple(sorted(context.unreduced_grads))
        key = context.call_key(micro_batch)
        key = (*key, torch.is_grad_enabled(), count, no_sync, unreduced)
        if key not in self.compiled_calls:
            captured = context.capture_on_all_ranks(micro_batch)
            program = build_pipeline_program(
                captured,
                context.op_strategies(captured, micro_batch),
                context.lowering_options(no_sync, unreduced),
                count,
            )
            if not context.options.on_trial:
                for graph in program.graphs.stages:
                    warn_of_numerics(graph.notes)
            mesh = context.mesh
            has_pp = mesh is not None and "pp" in (mesh.mesh_dim_names or ())
            group = mesh.get_group("pp") if mesh is not None and has_pp else None
            self.compiled_calls[key] = CompiledPipelineCall(
                program, self.plan, rank(), context.device, group
            )
        return self.compiled_calls[key]

    def rerun_with_all_tangents(self, call: PipelineCall, state: int) -> PipelineCall:
        """Runs the forward of a call again, so that every output can receive a gradient."""
        self.context.all_tangents = True
        with torch.enable_grad(), self.context.guards.as_of(state):
            again = self._call(list(call.micro_batches), call.no_sync)
        again.run_forward()
        return again


@dataclass
class _AutogradCall:
    """A call inside autograd.

    Attributes:
        executor: the executor.
        call: the call.
        roles: roles of the tensors given to autograd.
        state: state of the guards at the forward.
    """

    executor: PipelineExecutor
    call: PipelineCall
    roles: tuple[Differentiable, ...]
    state: int


class _PipelineFunction(torch.autograd.Function):
    """The forward and backward of one call."""

    @staticmethod
    def forward(
        ctx: Any, autograd_call: _AutogradCall, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Runs the schedule, or only its forwards."""
        ctx.autograd_call = autograd_call
        ctx.set_materialize_grads(False)
        call = autograd_call.call
        outputs = call.run_forward()
        flags = call.compiled.program.capture.differentiable
        pairs = zip(outputs, call.returned, strict=True)
        ctx.mark_non_differentiable(*(value for value, index in pairs if not flags[index]))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Runs the backwards, or collects the gradients of interleaved ones."""
        autograd_call: _AutogradCall = ctx.autograd_call
        call, executor = autograd_call.call, autograd_call.executor
        pairs = zip(call.returned, gradients, strict=True)
        tangents = {index: gradient for index, gradient in pairs if gradient is not None}
        if not call.compiled.program.graphs.tangents.issuperset(tangents):
            call = executor.rerun_with_all_tangents(call, autograd_call.state)
        retain_graph = backward_keeps_graph()
        call.run_backward(tangents, retain_graph)
        if call.interleaves_backward and tangents:
            usable = isfinite(call.loss_tangent) and call.loss_tangent
            executor.loss_tangent = call.loss_tangent if usable else 1.0
        found: list[torch.Tensor | None] = []
        for role in autograd_call.roles:
            match role:
                case Parameter(name):
                    gradient = call.take_gradient(name, retain_graph)
                    context = executor.context
                    found.append(None if gradient is None else context.as_grad_of(name, gradient))
                case Input(index):
                    found.append(call.input_gradient(index))
        return (None, *found, None)
