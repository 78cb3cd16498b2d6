"""A program inside autograd: forward runs one generated function, backward another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autopar._torch import backward_keeps_graph
from autopar.capture.call import BatchShard
from autopar.ir.roles import (
    Accumulated,
    BatchChecksum,
    BatchFraction,
    BatchIndex,
    Buffer,
    ChecksumSum,
    Differentiable,
    Gradient,
    Input,
    Output,
    Parameter,
    Saved,
    State,
    Tangent,
    UnreducedGrad,
    Update,
)
from autopar.runtime.agreement.channel import finish_exchange
from autopar.runtime.batch_checks import batch_checksum
from autopar.runtime.codegen.program import CompiledGraph, Program
from autopar.runtime.context import ExecutionContext
from autopar.runtime.parameters.distribute import local_part
from autopar.runtime.process_groups import explaining_comm_errors


@dataclass
class SpmdCall:
    """A call in progress.

    Attributes:
        context: state shared by all calls.
        leaves: flattened arguments of the call.
        shard: this rank's rows of the arguments.
        no_sync: whether gradients stay unreduced.
        state: state of the guards at the forward.
        get_program: returns a program, given `no_sync` and parameters with unreduced gradients.
        program: the program of the forward.
        differentiable: roles of the tensors given to autograd.
        updates: new values of buffers and inputs.
        checksum_sums: summed batch checksums, by axis.
    """

    context: ExecutionContext
    leaves: Sequence[Any]
    shard: BatchShard
    no_sync: bool
    state: int
    get_program: Callable[[bool, tuple[str, ...]], Program]
    program: Program
    differentiable: tuple[Differentiable, ...] = ()
    updates: dict[Buffer | Input | State, torch.Tensor] = field(default_factory=dict)
    checksum_sums: dict[str, torch.Tensor] = field(default_factory=dict)

    def run_forward(self, program: Program) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Runs the forward of a program; returns its outputs and its saved tensors."""
        with explaining_comm_errors("forward"):
            results = program.forward.run(self._forward_arguments(program))
        outputs, saved = [], []
        for role, value in zip(program.forward.outputs, results, strict=True):
            match role:
                case Output():
                    outputs.append(value)
                case Saved():
                    saved.append(value)
                case Update(of):
                    self.updates[of] = value
                case ChecksumSum(axis):
                    self.checksum_sums[axis] = value
        return outputs, saved

    def _forward_arguments(self, program: Program) -> list[torch.Tensor]:
        context, shard = self.context, self.shard
        parameters, buffers = context.index.parameters, context.index.buffers()
        inputs = dict(zip(shard.call.tensor_indices, shard.tensors, strict=True))
        values: list[torch.Tensor] = []
        for role in program.forward.inputs:
            match role:
                case Parameter(name):
                    values.append(local_part(parameters[name]).detach())
                case Buffer(name):
                    values.append(buffers[name])
                case Input(index):
                    values.append(inputs[index].detach())
                case BatchFraction():
                    fraction = shard.rows / shard.global_rows
                    values.append(
                        torch.tensor(fraction, dtype=torch.float64, device=context.device)
                    )
                case BatchIndex():
                    values.append(shard.slices.unit_indices(context.device))
                case BatchChecksum(axis):
                    mode = "global" if axis else context.options.batch
                    values.append(batch_checksum(self.leaves, shard.rows, mode, context.device))
        return values

    def run_backward(
        self, saved: list[torch.Tensor], tangents: dict[int, torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Runs the backward; returns the gradient of each tensor given to autograd.

        Args:
            saved: saved tensors of the forward; emptied.
            tangents: gradients of the outputs, by index.
        """
        program = self.program
        if not program.tangents.issuperset(tangents):
            program = self._program_with_all_tangents()
            saved[:] = self.run_forward(program)[1]
        backward = self._backward_graph(program)
        arguments = self._backward_arguments(backward, saved, tangents)
        saved.clear()
        if backward.donated_args and backward_keeps_graph():
            for place in backward.donated_args:
                arguments[place] = arguments[place].clone()
        with explaining_comm_errors("backward"):
            results = backward.run(arguments)
        finish_exchange()
        return self._gradients(backward, results)

    def _program_with_all_tangents(self) -> Program:
        """The program whose outputs all receive gradients, used from now on."""
        self.context.all_tangents = True
        with torch.enable_grad(), self.context.guards.as_of(self.state):
            return self.get_program(self.no_sync, ())

    def _backward_graph(self, program: Program) -> CompiledGraph:
        """The backward for the unreduced gradients that exist when it runs."""
        backward, unreduced = program.backward, tuple(sorted(self.context.unreduced_grads))
        if unreduced and not self.no_sync:
            with torch.enable_grad(), self.context.guards.as_of(self.state):
                backward = self.get_program(False, unreduced).backward
        assert backward is not None
        return backward

    def _backward_arguments(
        self, graph: CompiledGraph, saved: list[torch.Tensor], tangents: dict[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        saved_values, arguments = iter(saved), []
        for role in graph.inputs:
            match role:
                case Saved():
                    arguments.append(next(saved_values))
                case Tangent():
                    arguments.append(_tangent(graph, role, tangents))
                case Accumulated(name):
                    arguments.append(self.context.unreduced_grads.pop(name))
                case State():
                    state = self.context.compression_state.get(role, graph.fake_tensor(role))
                    arguments.append(state)
        return arguments

    def _gradients(self, graph: CompiledGraph, results: list[Any]) -> list[torch.Tensor | None]:
        found: dict[Differentiable, torch.Tensor] = {}
        unreduced = self.context.unreduced_grads
        for role, value in zip(graph.outputs, results, strict=True):
            match role:
                case UnreducedGrad(name) if name in unreduced:
                    unreduced[name] += value
                case UnreducedGrad(name):
                    unreduced[name] = value.contiguous()  # the strides that programs expect
                case Gradient(Parameter(name) as of) if value is not None:
                    found[of] = self.context.as_grad_of(name, value)
                case Gradient(of) if value is not None:
                    found[of] = value
        return [found.get(role) for role in self.differentiable]


class SpmdFunction(torch.autograd.Function):
    """The forward and backward of one call."""

    @staticmethod
    def forward(ctx: Any, call: SpmdCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the forward."""
        outputs, saved = call.run_forward(call.program)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        flags = call.program.capture.differentiable
        ctx.mark_non_differentiable(
            *[o for o, i in zip(outputs, call.program.returned, strict=True) if not flags[i]]
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Runs the backward on the gradients of the outputs."""
        call: SpmdCall = ctx.call
        pairs = zip(call.program.returned, gradients, strict=True)
        tangents = {index: gradient for index, gradient in pairs if gradient is not None}
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()
        return (None, *call.run_backward(saved, tangents))


def _tangent(
    graph: CompiledGraph, role: Tangent, tangents: dict[int, torch.Tensor]
) -> torch.Tensor:
    """The gradient of an output with the strides that the graph expects; zeros if absent."""
    fake = graph.fake_tensor(role)
    if role.index not in tangents:
        device = next(iter(tangents.values())).device if tangents else fake.device
        return torch.zeros(fake.shape, dtype=fake.dtype, device=device)
    value = tangents[role.index]
    return value if value.stride() == fake.stride() else value.contiguous()
