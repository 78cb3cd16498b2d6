"""One stage of a pipeline on its rank: what it runs for each micro-batch, without autograd."""

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


@dataclass
class StageStep:
    """What all stages of a rank share over one call.

    Attributes:
        arguments: gives an argument of a stage's forward for a micro-batch.
        tangents: gradients by outputs, for each micro-batch.
        micro_batches: how many there are.
        totals: sums over the batch, as they become known.
        whole: parameters that the first forward of a stage has gathered for all.
        held: local gradients that are kept, by parameter.
        states: what compression keeps from step to step.
        saved: what forwards have saved for their backwards, by stage and micro-batch.
        parts: what the micro-batches have added to totals so far.
        same: the parts that are the same for each of them.
        differentiates: whether a backward follows.
        keep: whether another backward may follow that one.
        outputs: what was returned, by index and micro-batch.
        gradients: of parameters and inputs, summed; those of inputs by micro-batch.
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


class Stage:
    """A stage.

    Attributes:
        index: which of them.
        program: what it runs.
    """

    def __init__(self, index: int, program: StageProgram) -> None:
        self.index, self.program = index, program
        self.step: StageStep | None = None
        self.pending: dict[int, Values] = {}  # what a backward in two has to go on with

    def begin(self, step: StageStep) -> None:
        """Takes up a call, or its second half: others may have run in between."""
        self.step = step
        self.pending.clear()

    def forward(self, micro: int, came: Values) -> Values:
        """Runs the forward on a micro-batch; takes what the stage below sent, returns what goes on.

        It empties `came`.
        """
        step, half = self._step, self.program.forward if micro else self.program.first_forward
        arguments = [
            came.pop(role) if isinstance(role, StageInput) else step.argument(role, micro)
            for role in half.inputs
        ]
        results = half.run(arguments)
        kept, sent = [], {}
        for role, value in zip(half.outputs, results, strict=True):
            match role:
                case Saved():
                    kept.append(value)
                case StageOutput():
                    sent[role] = value
                case Output(index):
                    step.outputs.setdefault(index, []).append(value)
                case MicrobatchPartial(index):
                    self._add_part(index, value)
                case UnshardedParam(name):
                    step.unsharded_params[name] = value
        if step.differentiates:
            step.saved[self.index, micro] = kept
        return sent

    def backward(self, micro: int, came: Values) -> Values:
        """Runs the backward on a micro-batch; takes what came from above, returns what goes below.

        It empties `came`. A backward in two runs up to what goes below; `finish` runs the rest.
        """
        found = self._backward(micro)
        if found is None:
            return {}
        first, *rest = found.parts
        known = came | dict(zip(found.saved, self._take(micro), strict=True))
        came.clear()
        later = frozenset(role for half in rest for role in half.inputs)
        sent = self._run(first, micro, known, later)
        if rest:
            self.pending[micro] = known
        return sent

    def weight_backward(self, micro: int) -> None:
        """Runs what is left of the backward on a micro-batch."""
        found = self._backward(micro)
        if found is not None and len(found.parts) > 1:
            self._run(found.parts[1], micro, self.pending.pop(micro))

    def _take(self, micro: int) -> list[torch.Tensor]:
        """What the forward on a micro-batch has saved; from here on the backward's own, to free."""
        step, place = self._step, (self.index, micro)
        return step.saved[place] if step.retain_graph else step.saved.pop(place)

    def _backward(self, micro: int) -> StageBackward | None:
        if micro == self._step.micro_batches - 1:
            return self.program.last_backward
        return self.program.middle_backward if micro else self.program.first_backward

    def _run(
        self, half: CompiledGraph, micro: int, known: Values, later: frozenset[Any] = frozenset()
    ) -> Values:
        """Runs one function of a backward; returns what is sent.

        Of `known` only what is used `later` stays: the rest is freed as the function runs.
        """
        step, sent = self._step, Values()
        arguments = [self._argument(half, role, micro, known, later) for role in half.inputs]
        results = half.run(arguments)
        for role, value in zip(half.outputs, results, strict=True):
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

    @property
    def _step(self) -> StageStep:
        assert self.step is not None
        return self.step

    def _add_part(self, index: int, value: torch.Tensor) -> None:
        parts, step = self._step.partials, self._step
        known = parts.get(index)
        parts[index] = (
            value if known is None or index in step.replicated_partials else known + value
        )

    def _argument(
        self, half: CompiledGraph, role: InputRole, micro: int, known: Values, later: frozenset[Any]
    ) -> torch.Tensor:
        step = self._step
        match role:
            case Saved() | StageInput():
                return known[role] if role in later else known.pop(role)
            case Tangent(index):
                return self._tangent(half, role, step.tangents[micro].get(index))
            case BatchTotal(index):
                return step.totals[index]
            case State():
                return step.compression_state.get(role, half.fake_tensor(role))
            case Accumulated(name, reduced):
                known_before = (step.gradients if reduced else step.unreduced_grads).pop(name, None)
                return self._before(half, role, known_before)
        raise AssertionError(f"a backward asks for {role}")

    @staticmethod
    def _tangent(half: CompiledGraph, role: Tangent, given: torch.Tensor | None) -> torch.Tensor:
        like = half.fake_tensor(role)
        if given is None:
            return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        given = given.to(like.dtype)
        return given if given.stride() == like.stride() else given.contiguous()

    @staticmethod
    def _before(half: CompiledGraph, role: Accumulated, known: torch.Tensor | None) -> torch.Tensor:
        like = half.fake_tensor(role)
        return (
            torch.zeros(like.shape, dtype=like.dtype, device=like.device)
            if known is None
            else known
        )


def _add(table: dict[Any, torch.Tensor], key: Any, value: torch.Tensor) -> None:
    if key in table:
        table[key] += value
        return
    place = value.data_ptr()  # a sum of two biases has one gradient, which both would add to
    shared = bool(place) and any(other.data_ptr() == place for other in table.values())
    table[key] = value.clone() if shared else value.contiguous()
