"""`Stage`: runs the generated functions of one pipeline stage, without autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.ir.roles import (
    Accumulated,
    BatchTotal,
    Gradient,
    Input,
    InputRole,
    MicrobatchPartial,
    Output,
    Parameter,
    Saved,
    StageInput,
    StageOutput,
    State,
    Tangent,
    UnreducedGrad,
    UnshardedParam,
)
from autopar.runtime.codegen.program import CompiledGraph
from autopar.runtime.parameters.compression_state import CompressionState
from autopar.runtime.pipeline.stage_program import StageBackward, StageProgram

Values = dict[Any, torch.Tensor]
"""Tensors by role."""


@dataclass
class StageStep:
    """State that all stages of a rank share during one call.

    Attributes:
        argument: callable that returns an argument of a forward, by role and micro-batch.
        micro_batches: number of micro-batches.
        unreduced_grads: local gradients that stay unreduced, by parameter name.
        compression_state: tensors that compression keeps between steps.
        replicated_partials: partials with the same value for every micro-batch.
        differentiates: whether a backward follows.
        retain_graph: whether another backward may follow.
        tangents: gradients by output index, for each micro-batch.
        totals: sums over the batch, by index.
        unsharded_params: parameters that the first forward gathered for all, by name.
        saved: saved tensors, by stage and micro-batch.
        partials: sums over the micro-batches so far, by index.
        outputs: outputs by index, in the order of micro-batches.
        gradients: gradients of parameters, summed over micro-batches.
        input_gradients: gradients of inputs, by index and micro-batch.
    """

    argument: Callable[[InputRole, int], torch.Tensor]
    micro_batches: int
    unreduced_grads: dict[str, torch.Tensor]
    compression_state: CompressionState
    replicated_partials: frozenset[int]
    differentiates: bool
    retain_graph: bool = False
    tangents: list[dict[int, torch.Tensor]] = field(default_factory=list)
    totals: dict[int, torch.Tensor] = field(default_factory=dict)
    unsharded_params: dict[str, torch.Tensor] = field(default_factory=dict)
    saved: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    partials: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    input_gradients: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)

    def add_partial(self, index: int, value: torch.Tensor) -> None:
        """Adds a micro-batch's partial."""
        known = self.partials.get(index)
        replaces = known is None or index in self.replicated_partials
        self.partials[index] = value if known is None or replaces else known + value

    def pop_saved(self, stage: int, micro: int) -> list[torch.Tensor]:
        """Saved tensors of a forward; the caller owns them unless the graph is retained."""
        key = (stage, micro)
        return self.saved[key] if self.retain_graph else self.saved.pop(key)


class Stage:
    """One pipeline stage.

    Attributes:
        index: index of the stage.
        program: generated functions of the stage.
        pending: values that `weight_backward` still needs, by micro-batch.
    """

    def __init__(self, index: int, program: StageProgram) -> None:
        self.index, self.program = index, program
        self._current: StageStep | None = None
        self.pending: dict[int, Values] = {}

    def begin(self, step: StageStep) -> None:
        """Begins a schedule of a call; other calls may have run since the last one."""
        self._current = step
        self.pending.clear()

    @property
    def _step(self) -> StageStep:
        assert self._current is not None
        return self._current

    def forward(self, micro: int, received: Values) -> Values:
        """Runs the forward on a micro-batch.

        Args:
            micro: index of the micro-batch.
            received: tensors from the previous stage; emptied.

        Returns:
            Tensors for the next stage.
        """
        step, graph = self._step, self.program.forward if micro else self.program.first_forward
        arguments = [
            received.pop(role) if isinstance(role, StageInput) else step.argument(role, micro)
            for role in graph.inputs
        ]
        results = graph.run(arguments)
        saved, sent = [], {}
        for role, value in zip(graph.outputs, results, strict=True):
            match role:
                case Saved():
                    saved.append(value)
                case StageOutput():
                    sent[role] = value
                case Output(index):
                    step.outputs.setdefault(index, []).append(value)
                case MicrobatchPartial(index):
                    step.add_partial(index, value)
                case UnshardedParam(name):
                    step.unsharded_params[name] = value
        if step.differentiates:
            step.saved[self.index, micro] = saved
        return sent

    def backward(self, micro: int, received: Values) -> Values:
        """Runs the backward on a micro-batch, up to the input gradients if it is split.

        Args:
            micro: index of the micro-batch.
            received: tensors from the next stage; emptied.

        Returns:
            Tensors for the previous stage.
        """
        backward = self._backward(micro)
        if backward is None:
            return {}
        first, *rest = backward.parts
        saved = self._step.pop_saved(self.index, micro)
        known = received | dict(zip(backward.saved, saved, strict=True))
        received.clear()
        del saved
        later = frozenset(role for graph in rest for role in graph.inputs)
        sent = self._run(first, micro, known, later)
        if rest:
            self.pending[micro] = known
        return sent

    def weight_backward(self, micro: int) -> None:
        """Runs the second part of a split backward: the parameter gradients."""
        backward = self._backward(micro)
        if backward is not None and len(backward.parts) > 1:
            self._run(backward.parts[1], micro, self.pending.pop(micro))

    def _backward(self, micro: int) -> StageBackward | None:
        if micro == self._step.micro_batches - 1:
            return self.program.last_backward
        return self.program.middle_backward if micro else self.program.first_backward

    def _run(
        self, graph: CompiledGraph, micro: int, known: Values, later: frozenset[Any] = frozenset()
    ) -> Values:
        """Runs one function of a backward and returns the tensors to send.

        Args:
            graph: the function.
            micro: index of the micro-batch.
            known: saved and received tensors; entries not needed `later` are removed.
            later: roles that the rest of the backward needs.
        """
        step, sent = self._step, Values()
        arguments = [self._argument(graph, role, micro, known, later) for role in graph.inputs]
        results = graph.run(arguments)
        for role, value in zip(graph.outputs, results, strict=True):
            match role:
                case StageOutput():
                    sent[role] = value
                case Saved():
                    known[role] = value
                case UnreducedGrad(name):
                    _add(step.unreduced_grads, name, value)
                case Gradient(Parameter(name)) if value is not None:
                    _add(step.gradients, name, value)
                case Gradient(Input(index)) if value is not None:
                    _add(step.input_gradients.setdefault(index, {}), micro, value)
        return sent

    def _argument(
        self,
        graph: CompiledGraph,
        role: InputRole,
        micro: int,
        known: Values,
        later: frozenset[Any],
    ) -> torch.Tensor:
        step = self._step
        match role:
            case Saved() | StageInput():
                return known[role] if role in later else known.pop(role)
            case Tangent(index):
                tangent, fake = step.tangents[micro].get(index), graph.fake_tensor(role)
                if tangent is None:
                    return _zeros_like(fake)
                tangent = tangent.to(fake.dtype)
                return tangent if tangent.stride() == fake.stride() else tangent.contiguous()
            case BatchTotal(index):
                return step.totals[index]
            case State():
                return step.compression_state.get(role, graph.fake_tensor(role))
            case Accumulated(name, reduced):
                table = step.gradients if reduced else step.unreduced_grads
                before = table.pop(name, None)
                return _zeros_like(graph.fake_tensor(role)) if before is None else before
        raise AssertionError(f"a backward has the unexpected input {role}")


def _zeros_like(fake: torch.Tensor) -> torch.Tensor:
    return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)


def _add(table: dict[Any, torch.Tensor], key: Any, value: torch.Tensor) -> None:
    if key in table:
        table[key] += value
        return
    address = value.data_ptr()  # summed biases share one gradient tensor
    shared = bool(address) and any(other.data_ptr() == address for other in table.values())
    table[key] = value.clone() if shared else value.contiguous()
