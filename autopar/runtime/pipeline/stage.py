"""`Stage`: runs the generated functions of one pipeline stage, without autograd."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from autopar.core.ir import roles
from autopar.core.ir.graph import TrainingGraph
from autopar.passes.core.node_builder import dims_by_stride
from autopar.runtime.codegen.program import CompiledGraph
from autopar.runtime.context import ExecutionContext

Values = dict[Any, torch.Tensor]
"""Tensors by role."""


@dataclass(frozen=True)
class StageBackward:
    """The backward of a stage.

    Attributes:
        graph: the whole backward.
        parts: one function, or one for input gradients and one for parameter gradients.
        finish: awaits the reductions that the parts have started, None if there are none.
    """

    graph: TrainingGraph
    parts: tuple[CompiledGraph, ...]
    finish: CompiledGraph | None = None

    @cached_property
    def fake_tensors(self) -> Mapping[Any, torch.Tensor]:
        """The fake tensor of each role of the whole backward."""
        return CompiledGraph(self.graph, self.parts[0].run).fake_tensors


@dataclass(frozen=True)
class StageProgram:
    """The functions of one stage.

    Attributes:
        gathers: starts the gathers of parameters for all micro-batches, None if there are none.
        first_forward: of the first micro-batch; it may await these gathers.
        first_backward: backward of the first of several micro-batches.
        middle_backward: backward of those in between, which accumulates gradients.
        last_backward: backward of the last, which also reduces accumulated gradients.
    """

    gathers: CompiledGraph | None
    first_forward: CompiledGraph
    forward: CompiledGraph
    first_backward: StageBackward | None
    middle_backward: StageBackward | None
    last_backward: StageBackward | None

    @property
    def graphs(self) -> Iterator[TrainingGraph]:
        """Graphs of the functions, in a fixed order."""
        forwards = self.gathers, self.first_forward, self.forward
        backwards = self.first_backward, self.middle_backward, self.last_backward
        yield from (each.graph for each in (*forwards, *backwards) if each is not None)


class Reducing(NamedTuple):
    """Reductions under way after a backward: what awaits them, and the values it reads."""

    graph: CompiledGraph
    micro: int
    known: Values


class StageCall(Protocol):
    """Tensors and state of a call, as a stage reads and extends them.

    `autopar.runtime.pipeline.call.PipelineCall` implements it.
    """

    context: ExecutionContext
    retain_graph: bool
    tangents: list[dict[int, torch.Tensor]]
    totals: dict[int, torch.Tensor]
    unsharded_params: dict[str, torch.Tensor]
    saved: dict[tuple[int, int], list[torch.Tensor]]
    partials: dict[int, torch.Tensor]
    outputs: dict[int, list[torch.Tensor]]
    gradients: dict[str, torch.Tensor]
    input_gradients: dict[int, dict[int, torch.Tensor]]

    @property
    def differentiates(self) -> bool: ...

    def argument(self, role: roles.InputRole, micro: int) -> torch.Tensor: ...

    def add_partial(self, index: int, value: torch.Tensor) -> None: ...


class Stage:
    """One pipeline stage."""

    call: StageCall  # set by the schedule

    def __init__(self, index: int, programs: Sequence[StageProgram]) -> None:
        self.index, self.programs = index, programs  # of each micro-batch
        self.pending: dict[int, Values] = {}
        self.gathered = Values()  # what `gathers` has left to the first forward
        self.reducing: Reducing | None = None

    def start(self, call: StageCall, *, forwards: bool) -> None:
        """Begins a schedule: starts the gathers ahead of its forwards, before any input has come.

        Other calls may have run, or have failed, since the last one.
        """
        self.call, self.reducing = call, None
        self.pending.clear()
        self.gathered.clear()
        gathers = self.programs[0].gathers
        if forwards and gathers is not None:
            results = gathers.run([call.argument(role, 0) for role in gathers.graph.inputs])
            self.gathered = dict(zip(gathers.graph.outputs, results, strict=True))

    def forward(self, micro: int, received: Values) -> Values:
        self.finish()
        call, program = self.call, self.programs[micro]
        graph = program.forward if micro else program.first_forward
        known = received | self.gathered
        received.clear()
        self.gathered = Values()
        arguments = [
            known.pop(role) if role in known else call.argument(role, micro)
            for role in graph.graph.inputs
        ]
        results = graph.run(arguments)
        saved, sent = [], {}
        for role, value in zip(graph.graph.outputs, results, strict=True):
            match role:
                case roles.Saved():
                    saved.append(value)
                case roles.StageOutput():
                    sent[role] = value
                case roles.Output(index):
                    call.outputs.setdefault(index, []).append(value)
                case roles.MicrobatchPartial(index):
                    call.add_partial(index, value)
                case roles.UnshardedParam(name):
                    call.unsharded_params[name] = value
        if call.differentiates:
            call.saved[self.index, micro] = saved
        return sent

    def backward(self, micro: int, received: Values) -> Values:
        """Runs the backward on a micro-batch, up to the input gradients if it is split.

        Reductions may be under way at its end. They are awaited before the next work of the stage,
        so that memory is free for it, but after the gradient is sent.
        """
        self.finish()
        backward = self._backward(micro)
        if backward is None:
            return {}
        first, *rest = backward.parts
        call, key = self.call, (self.index, micro)
        saved = call.saved[key] if call.retain_graph else call.saved.pop(key)
        saved_roles = (r for r in backward.graph.inputs if isinstance(r, roles.Saved))
        known = received | dict(zip(saved_roles, saved, strict=True))
        # `known` holds the only references now. So `_run` frees each activation after its use, not
        # after the whole backward.
        received.clear()
        del saved
        sent = self._run(first, micro, known, _inputs(*rest, backward.finish))
        if rest:
            self.pending[micro] = known
        elif backward.finish is not None:
            self.reducing = Reducing(backward.finish, micro, known)
        return sent

    def weight_backward(self, micro: int) -> None:
        """Runs the second part of a split backward: the parameter gradients."""
        backward = self._backward(micro)
        if backward is None or len(backward.parts) == 1:
            return
        self.finish()
        known = self.pending.pop(micro)
        self._run(backward.parts[1], micro, known, _inputs(backward.finish))
        if backward.finish is not None:
            self.reducing = Reducing(backward.finish, micro, known)

    def finish(self) -> None:
        """Awaits the reductions of the last backward."""
        if self.reducing is not None:
            graph, micro, known = self.reducing
            self.reducing = None
            self._run(graph, micro, known)

    def _backward(self, micro: int) -> StageBackward | None:
        program = self.programs[micro]
        if micro == len(self.programs) - 1:
            return program.last_backward
        return program.middle_backward if micro else program.first_backward

    def _run(
        self, graph: CompiledGraph, micro: int, known: Values, later: frozenset[Any] = frozenset()
    ) -> Values:
        """Runs one function of a backward and returns the tensors to send."""
        call, sent = self.call, Values()
        inputs = graph.graph.inputs
        results = graph.run([self._argument(graph, role, micro, known, later) for role in inputs])
        for role, value in zip(graph.graph.outputs, results, strict=True):
            match role:
                case roles.StageOutput():
                    sent[role] = value
                case roles.Saved():
                    known[role] = value
                case roles.UnreducedGrad(name):
                    call.context.hold(name, value)
                case roles.Gradient(roles.Parameter(name)) if value is not None:
                    _add(call.gradients, name, value)
                case roles.Gradient(roles.Input(index)) if value is not None:
                    _add(call.input_gradients.setdefault(index, {}), micro, value)
        return sent

    def _argument(
        self,
        graph: CompiledGraph,
        role: roles.InputRole,
        micro: int,
        known: Values,
        later: frozenset[Any],
    ) -> torch.Tensor:
        call = self.call
        match role:
            case roles.Saved() | roles.StageInput():
                return known[role] if role in later else known.pop(role)
            case roles.Tangent(index):
                tangent, fake = call.tangents[micro].get(index), graph.fake_tensors[role]
                if tangent is None:
                    return _zeros_like(fake)
                tangent = tangent.to(fake.dtype)
                return tangent if tangent.stride() == fake.stride() else tangent.contiguous()
            case roles.BatchTotal(index):
                return call.totals[index]
            case roles.State():
                return call.context.compression_state.get(role, graph.fake_tensors[role])
            case roles.Accumulated(name, reduced):
                held = call.context.held_gradients
                before = call.gradients.pop(name, None) if reduced else held.take(name)
                return _zeros_like(graph.fake_tensors[role]) if before is None else before
        raise AssertionError(f"a backward has the unexpected input {role}")


def inputs_of_next(sent: Values) -> Values:
    """Values that a stage sends, as inputs of a neighbour on the same rank; dense, as messages."""
    return {roles.StageInput(role.value, role.phase): _dense(value) for role, value in sent.items()}


def _dense(value: torch.Tensor) -> torch.Tensor:
    dims = dims_by_stride(value)
    ordered = value.permute(dims)
    if ordered.is_contiguous():
        return value
    return ordered.contiguous().permute([dims.index(dim) for dim in range(len(dims))])


def _inputs(*graphs: CompiledGraph | None) -> frozenset[roles.InputRole]:
    """The inputs of functions that run later."""
    return frozenset(role for graph in graphs if graph is not None for role in graph.graph.inputs)


def _zeros_like(fake: torch.Tensor) -> torch.Tensor:
    return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)


def _add(table: dict[Any, torch.Tensor], key: Any, value: torch.Tensor) -> None:
    if key in table:
        table[key] += value
        return
    address = value.data_ptr()  # summed biases share one gradient tensor
    shared = bool(address) and any(other.data_ptr() == address for other in table.values())
    table[key] = value.clone() if shared else value.contiguous()
