"""A program inside autograd: forward runs one generated function, backward the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autopar._torch import backward_keeps_graph
from autopar.ir.roles import (
    Accumulated,
    ChecksumSum,
    Differentiable,
    Gradient,
    Output,
    Parameter,
    Saved,
    State,
    Tangent,
    UnreducedGrad,
    Update,
)
from autopar.runtime.agreement.channel import finish_exchange
from autopar.runtime.codegen.program import CompiledGraph, Program
from autopar.runtime.parameters.compression_state import CompressionState
from autopar.runtime.process_groups import explaining_comm_errors


@dataclass
class SpmdCall:
    """One call under way.

    Attributes:
        program: what runs.
        arguments_of: the arguments of the forward of a program of this call.
        differentiable: what the tensors given to autograd are.
        backward_half: chooses the backward when it comes (held gradients may have changed).
        general: the same call with gradients by every output, if they come unexpectedly.
        held: local gradients of earlier calls, by parameter.
        states: what compression keeps.
        wrap: makes a parameter's gradient out of its local part.
        updates: new values of buffers and inputs.
        verdicts: what the ranks of each axis added up of their evidence.
    """

    program: Program
    arguments_of: Callable[[Program], list[torch.Tensor]]
    differentiable: tuple[Differentiable, ...]
    backward_half: Callable[[Program], CompiledGraph]
    program_with_all_tangents: Callable[[], Program]
    unreduced_grads: dict[str, torch.Tensor]
    compression_state: CompressionState
    as_grad_of: Callable[[str, torch.Tensor], torch.Tensor]
    updates: dict[Any, torch.Tensor]
    checksum_sums: dict[str, torch.Tensor] = field(default_factory=dict)


def run_forward(running: SpmdCall, program: Program) -> tuple[list[torch.Tensor], list[Any]]:
    """Runs a forward; returns its outputs and what it saves."""
    with explaining_comm_errors("forward"):
        results = program.forward.run(running.arguments_of(program))
    outputs, saved = [], []
    for role, value in zip(program.forward.outputs, results, strict=True):
        if isinstance(role, Output):
            outputs.append(value)
        elif isinstance(role, Saved):
            saved.append(value)
        elif isinstance(role, Update):
            running.updates[role.of] = value
        elif isinstance(role, ChecksumSum):
            running.checksum_sums[role.axis] = value
    return outputs, saved


class SpmdFunction(torch.autograd.Function):
    """The forward and backward of one call, as autograd sees them."""

    @staticmethod
    def forward(ctx: Any, running: SpmdCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the forward half."""
        program = running.program
        outputs, saved = run_forward(running, program)
        ctx.running = running
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        flags = program.capture.differentiable
        ctx.mark_non_differentiable(
            *[o for o, i in zip(outputs, program.returned, strict=True) if not flags[i]]
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Runs the backward half on the gradients of the outputs."""
        running: SpmdCall = ctx.running
        program = running.program
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()
        given = {
            index: gradient
            for index, gradient in zip(program.returned, gradients, strict=True)
            if gradient is not None
        }
        if not program.tangents.issuperset(given):
            program = running.program_with_all_tangents()
            saved = run_forward(running, program)[1]
        half = running.backward_half(program)
        arguments = _arguments(half, saved, given, running)
        if half.donated_args and backward_keeps_graph():
            for place in half.donated_args:
                arguments[place] = arguments[place].clone()
        del saved
        with explaining_comm_errors("backward"):
            results = half.run(arguments)
        finish_exchange()
        return (None, *_gradients(half, results, running))


def _arguments(
    half: CompiledGraph,
    saved: list[torch.Tensor],
    given: dict[int, torch.Tensor],
    running: SpmdCall,
) -> list[torch.Tensor]:
    values = iter(saved)
    arguments = []
    for role in half.inputs:
        if isinstance(role, Saved):
            arguments.append(next(values))
        elif isinstance(role, Tangent):
            arguments.append(_tangent(half, role, given))
        elif isinstance(role, Accumulated):
            arguments.append(running.unreduced_grads.pop(role.name))
        elif isinstance(role, State):
            arguments.append(running.compression_state.get(role, half.fake_tensor(role)))
    return arguments


def _tangent(half: CompiledGraph, role: Tangent, given: dict[int, torch.Tensor]) -> torch.Tensor:
    like = half.fake_tensor(role)
    if role.index not in given:
        device = next(iter(given.values())).device if given else like.device
        return torch.zeros(like.shape, dtype=like.dtype, device=device)
    value = given[role.index]
    return value if value.stride() == like.stride() else value.contiguous()


def _gradients(
    half: CompiledGraph, results: list[Any], running: SpmdCall
) -> list[torch.Tensor | None]:
    found: dict[Differentiable, torch.Tensor] = {}
    for role, value in zip(half.outputs, results, strict=True):
        if isinstance(role, UnreducedGrad):
            if role.name in running.unreduced_grads:
                running.unreduced_grads[role.name] += value
            else:
                running.unreduced_grads[role.name] = (
                    value.contiguous()
                )  # as the program that adds it expects
        elif isinstance(role, Gradient) and value is not None:
            is_parameter = isinstance(role.of, Parameter)
            found[role.of] = running.as_grad_of(role.of.name, value) if is_parameter else value  # type: ignore[union-attr]
    return [found.get(item) for item in running.differentiable]
