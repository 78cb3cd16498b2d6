"""`SpmdExecutor`: runs a program without pipeline stages inside autograd."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar._torch import (
    apply_function,
    backward_keeps_graph,
    local_tensor,
    will_run,
)
from autopar.capture.call import BatchShard
from autopar.capture.state.guards import BackwardState
from autopar.capture.trace import Capture
from autopar.core.common.bounded_cache import BoundedCache, paused_collector
from autopar.core.common.notices import warn_of_notes
from autopar.core.ir import roles
from autopar.errors import CaptureError, StrategyError
from autopar.runtime.agreement.channel import finish_exchange
from autopar.runtime.agreement.ragged import (
    RECOMPUTE_ADVICE,
    SIZES_ADVICE,
    check_collectives,
    have_all,
)
from autopar.runtime.agreement.transforms import (
    check_not_batched,
    tell_of_saved_tensors_hooks,
)
from autopar.runtime.border.first_derivative import differentiable_once
from autopar.runtime.border.gradient_hooks import leave_out_hooks
from autopar.runtime.border.output_shards import whole_later
from autopar.runtime.border.results import results_of
from autopar.runtime.codegen.cuda_graphs import GraphedFunction, with_cuda_graphs
from autopar.runtime.codegen.program import CompiledGraph, Program, build_program, untouched
from autopar.runtime.codegen.surroundings import apart_from_hooks
from autopar.runtime.context import ExecutionContext, batch_fraction, inputs_of
from autopar.runtime.parameters.sharded_view import version_of
from autopar.runtime.parameters.whole_gradient import whole_gradient
from autopar.runtime.process_groups import explaining_comm_errors
from autopar.runtime.spmd.derivatives import changed_operands, differentiated
from autopar.runtime.tracing.earlier_modes import as_called


@dataclass
class SpmdExecutor:
    """Runs calls of a module whose plan has no pipeline stages."""

    context: ExecutionContext
    programs: BoundedCache[Program] = field(default_factory=BoundedCache)

    def run(self, shard: BatchShard, no_sync: bool) -> Any:
        context, key = self.context, self._key(shard, no_sync)
        program = self._program(key, shard, no_sync)
        call = SpmdCall(self, shard, no_sync, context.guards.state, program, key[0])
        with context.rng.as_default(program.is_random), context.without_autocast():
            if program.backward is None:
                with torch.no_grad():
                    outputs = call.run_forward(program)[0]
            else:
                if program.is_random:
                    call.random_state = context.rng.current_state()
                call.differentiate_by(context.differentiable_inputs(shard))
                call.python = context.guards.for_backward()
                tell_of_saved_tensors_hooks(are_called=True)
                if program.overwritten_buffers:
                    call.keep_buffers(context.index.buffers())
                try:
                    outputs = apply_function(SpmdFunction, call, *call.operands.values())
                except BaseException:  # a checkpoint stops its second forward like this
                    self._write_updates(call)
                    raise
        finish_exchange()  # the program may have no collective
        self._write_updates(call)
        return context.result_of(program.capture, program.returned, outputs)

    def run_again(
        self,
        call: SpmdCall,
        shard: BatchShard,
        program: Program,
        operands: dict[str | int, torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Runs a program with the state and the random numbers of an earlier call."""
        context = self.context
        again = replace(call, shard=shard, program=program, updates={})
        again.differentiate_by(operands)
        replayed = context.rng.replayed(call.random_state)
        outputs: tuple[torch.Tensor, ...]
        with torch.enable_grad(), context.without_autocast(), replayed:
            outputs = apply_function(SpmdFunction, again, *operands.values())
        # the call itself has written them: running statistics would take this batch twice
        again.updates.clear()
        finish_exchange()
        return outputs

    def program(self, shard: BatchShard, no_sync: bool, unreduced: tuple[str, ...] = ()) -> Program:
        """The program of a call, built at its first run; `unreduced` as in `LoweringOptions`."""
        return self._program(self._key(shard, no_sync, unreduced), shard, no_sync, unreduced)

    def _key(
        self, shard: BatchShard, no_sync: bool, unreduced: tuple[str, ...] = ()
    ) -> tuple[Any, ...]:
        """Everything that distinguishes programs; `ExecutionContext.modes` come first."""
        return (*self.context.call_key(shard), torch.is_grad_enabled(), no_sync, unreduced)

    def _program(
        self,
        key: tuple[Any, ...],
        shard: BatchShard,
        no_sync: bool,
        unreduced: tuple[str, ...] = (),
    ) -> Program:
        context = self.context
        program, ragged = self.programs.get(key), context.options.ragged
        # captures are compared across ranks, so one rank's new sizes make all build a program
        is_made = have_all(program is not None) if ragged else program is not None
        if program is not None and is_made:
            return program
        program = self._new_program(shard, no_sync, unreduced)
        # A minimum cut weighs this rank's parts, so passes alone do not make ranks agree.
        check_collectives([program.graph], SIZES_ADVICE if ragged else RECOMPUTE_ADVICE)
        return self.programs.add(key, program, context.options.max_programs)

    def _new_program(self, shard: BatchShard, no_sync: bool, unreduced: tuple[str, ...]) -> Program:
        context = self.context
        with paused_collector(), apart_from_hooks():
            captured = context.capture_on_all_ranks(shard)
            _check_changed_inputs(captured, shard)
            with context.without_autocast():  # it would cast what passes compute once more
                program = build_program(
                    captured,
                    context.op_strategies(captured, shard),
                    context.lowering_options(no_sync, unreduced),
                    context.options.recorder,
                )
            options = context.options
            alone = options.recorder is None and not options.on_trial
            if options.cuda_graphs and alone and not shard.call.derivatives:
                program = with_cuda_graphs(program, context.graph_pool)
        if not context.options.on_trial:
            warn_of_notes(program.graph.notes, trains=program.backward is not None)
            if not shard.call.derivatives:
                context.tell_of_shapes(shard)
        return program

    def _write_updates(self, call: SpmdCall) -> None:
        if not call.updates:
            return
        updates = call.updates.items()
        buffers = {of.name: value for of, value in updates if isinstance(of, roles.Buffer)}
        self.context.write_buffers(buffers, call.program.capture.rebound_buffers)
        inputs = inputs_of(call.shard)
        with torch.no_grad():
            for of, value in updates:
                if isinstance(of, roles.Input):
                    inputs[of.index].copy_(value)
        call.updates.clear()  # the loss keeps the call alive


@dataclass
class SpmdCall:
    """A call in progress.

    Attributes:
        state: state of the guards at the forward.
        python: state that Python code of the backward reads, as it was at the forward.
        program: the program of the forward.
        modes: those of the context at the forward.
        operands: what autograd differentiates by: parameters by name, inputs by index.
        versions: how often each of them had been changed in place.
        buffers: values before the forward of buffers that it changes and its results depend on.
        random_state: state of the generator at the forward, None where nothing is drawn.
    """

    executor: SpmdExecutor
    shard: BatchShard
    no_sync: bool
    state: int
    program: Program
    modes: tuple[Any, ...]
    operands: dict[str | int, torch.Tensor] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    updates: dict[Any, torch.Tensor] = field(default_factory=dict)
    random_state: torch.Tensor | None = None
    python: BackwardState | None = None

    @property
    def context(self) -> ExecutionContext:
        return self.executor.context

    def differentiate_by(self, operands: dict[str | int, torch.Tensor]) -> None:
        """Takes the tensors that autograd differentiates by."""
        self.operands, self.versions = operands, list(map(version_of, operands.values()))

    def keep_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Keeps what running the forward again needs, and the forward overwrites."""
        self.buffers = {name: buffers[name].clone() for name in self.program.overwritten_buffers}

    def run_forward(self, program: Program) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        with explaining_comm_errors("forward"):
            results = program.forward.run(self._forward_arguments(program))
        outputs = []
        for place, role in program.forward.other_outputs:
            match role:
                case roles.Output():
                    outputs.append(results[place])
                case roles.Update(of):
                    self.updates[of] = results[place]
        return outputs, [results[place] for place in program.forward.saved_outputs]

    def _forward_arguments(self, program: Program) -> list[torch.Tensor]:
        context, shard, graph = self.context, self.shard, program.forward
        parameters, buffers = context.index.parameters, context.index.buffers()
        buffers |= self.buffers
        inputs = inputs_of(shard)
        values: list[Any] = [None] * len(graph.graph.inputs)
        sharded = context.index.dtensors
        for place, name in graph.parameter_inputs:
            value = self.operands.get(name, parameters[name])
            values[place] = local_tensor(value) if name in sharded else value
        for place in program.returned_parameters:
            values[place] = values[place].detach()
        for place, role in graph.other_inputs:
            match role:
                case roles.Buffer(name):
                    values[place] = buffers[name]
                case roles.Input(index):
                    values[place] = inputs[index].detach()
                case roles.BatchFraction():
                    values[place] = batch_fraction(shard, context.device)
                case roles.BatchIndex():
                    values[place] = shard.slices.unit_indices(context.device)
        return values

    def run_backward(
        self,
        saved: list[torch.Tensor],
        tangents: dict[int, torch.Tensor],
        left_out: Set[str | int],
    ) -> list[torch.Tensor | None]:
        """Runs the backward; returns the gradient of each tensor given to autograd.

        Those of operands that are `left_out` are None, and are not held back.
        """
        program, context = self.program, self.context
        self._check_current()
        if not program.tangents.issuperset(tangents):
            # Captures take gradients of scalar outputs alone, since a zero gradient of logits would
            # be a full-size tensor. Another output has one now, so later calls take all.
            context.all_tangents = True
            program = self._program_again(self.no_sync)
            with context.rng.replayed(self.random_state), context.without_autocast():
                # in place, or the caller's list would keep the first forward's tensors alive
                saved[:] = self.run_forward(program)[1]
        backward, unreduced = program.backward, context.held_gradients.names
        if unreduced and not self.no_sync:
            backward = self._program_again(False, unreduced).backward
        assert backward is not None
        arguments = self._backward_arguments(backward, saved, tangents)
        saved.clear()
        keeps_graph = backward_keeps_graph()
        if backward.donated_args and keeps_graph:
            # the kernels write over these, and another backward will read them
            for place in backward.donated_args:
                arguments[place] = arguments[place].clone()
        with explaining_comm_errors("backward"):
            results = backward.run(arguments)
        finish_exchange()
        if isinstance(run := self.program.forward.run, GraphedFunction) and not keeps_graph:
            run.take_back(self)
        # What compression left out of a gradient, or no_sync held back, is one by itself.
        by_gradient = {} if _has_states(backward) else program.outputs_by_gradient
        absent = untouched(by_gradient, tangents) - {*unreduced}
        return self._gradients(backward, results, absent | left_out)

    def _check_current(self) -> None:
        """Raises StrategyError if what the forward read has changed since.

        It gathered sharded parameters, and Python code of the backward read state.
        """
        self.context.guards.check_backward(self.python)
        if changed := changed_operands(self, self.context.index.dtensors):
            raise StrategyError(
                f"{changed[0]} was changed in place between a call and its backward, which would "
                "use the values of the call. Change parameters after the backward."
            )

    def _program_again(self, no_sync: bool, unreduced: tuple[str, ...] = ()) -> Program:
        """A program as of the forward, for the gradients that the backward meets."""
        context = self.context
        with context.guards.as_of(self.state), as_called(context, self.modes):
            return self.executor.program(self.shard, no_sync, unreduced)

    def _backward_arguments(
        self, graph: CompiledGraph, saved: list[torch.Tensor], tangents: dict[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        arguments: list[Any] = list(saved)
        value: torch.Tensor | None
        for place, role in graph.unsaved_inputs:  # ascending
            match role:
                case roles.Tangent():
                    value = _tangent(graph, role, tangents)
                case roles.Accumulated(name):
                    value = self.context.held_gradients.take(name)
                case roles.State():
                    value = self.context.compression_state.get(role, graph.fake_tensors[role])
            arguments.insert(place, value)
        return arguments

    def _gradients(
        self, graph: CompiledGraph, results: list[Any], absent: set[str | int]
    ) -> list[torch.Tensor | None]:
        context, sharded = self.context, self.context.index.dtensors
        for place, role in graph.other_outputs:
            if isinstance(role, roles.UnreducedGrad) and role.name not in absent:
                context.hold(role.name, results[place])
        found: list[torch.Tensor | None] = []
        gradients = graph.gradient_outputs
        for key in self.operands:
            value = results[gradients[key]] if key in gradients.keys() - absent else None
            if value is not None and key in sharded:
                value = context.as_grad_of(str(key), value)
            if isinstance(key, str):
                context.outside_gradients.from_call(key, value)
            found.append(value)
        return found


class SpmdFunction(torch.autograd.Function):
    """The forward and backward of one call."""

    @staticmethod
    def forward(ctx: Any, call: SpmdCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, saved = call.run_forward(call.program)
        if isinstance(run := call.program.forward.run, GraphedFunction):
            run.lend(call)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        flags = [call.program.capture.differentiable[i] for i in call.program.returned]
        outputs = whole_later(call, call.program, results_of(outputs, flags, saved))
        ctx.mark_non_differentiable(
            *[o for o, trains in zip(outputs, flags, strict=True) if not trains]
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: SpmdCall = ctx.call
        pairs = zip(call.program.returned, gradients, strict=True)
        tangents = {i: whole_gradient(gradient) for i, gradient in pairs if gradient is not None}
        if call.context.options.ranks > 1:
            check_not_batched(tangents.values())
        why_once = ""
        if torch.is_grad_enabled() and tangents:  # create_graph=True
            needed = [_is_needed(node) for node, _ in ctx.next_functions]
            keys = [key for key, flag in zip(call.operands, needed, strict=True) if flag]
            try:
                with call.context.turn:
                    by_key = differentiated(call, tangents, keys)
                derived = [by_key.get(key) for key in call.operands]
                leave_out_hooks(call.operands.values(), derived)
                return (None, *derived)
            except CaptureError as error:
                why_once = str(error)
        nodes = [node for node, _ in ctx.next_functions]
        by_operand = dict(zip(call.operands, nodes, strict=True))
        left_out = _left_out(by_operand) if call.no_sync else frozenset[str | int]()
        saved = list(ctx.saved_tensors)
        # the node would hold every activation until this backward returns
        ctx.maybe_clear_saved_tensors()
        with call.context.turn, torch.no_grad():
            results = call.run_backward(saved, tangents, left_out)
        leave_out_hooks(call.operands.values(), results)
        if why_once:
            operands = *call.operands.values(), *gradients
            results = list(differentiable_once(results, operands, why_once))
        return (None, *results)


def _left_out(nodes: Mapping[str | int, Any]) -> set[str | int]:
    """The operands whose gradient a backward inside of no_sync was not asked for.

    Raises:
        StrategyError: torch.autograd.grad asks for one of a parameter, which is held back.
    """
    left_out = set[str | int]()
    for key, node in nodes.items():
        try:
            if node is None or not will_run(node):
                left_out.add(key)
        except RuntimeError as error:  # torch's answer for a leaf of torch.autograd.grad
            if isinstance(key, str):
                raise StrategyError(
                    f"torch.autograd.grad asks for the gradient of {key} inside of no_sync(), "
                    "which holds it back. Call it outside of no_sync()."
                ) from error
    return left_out


def _is_needed(node: Any) -> bool:
    """Whether the backward that runs needs the gradient that goes to a node."""
    try:
        return node is not None and will_run(node)
    except RuntimeError:  # torch's answer for a leaf that torch.autograd.grad was given
        return True


def _check_changed_inputs(captured: Capture, shard: BatchShard) -> None:
    """Checks that forward changes no argument in place of which other ranks have rows too.

    Raises:
        StrategyError: it would change this rank's rows alone.
    """
    if shard.rows == shard.slices.rows:
        return
    updates = (role.of for role in captured.graph.outputs if isinstance(role, roles.Update))
    for of in updates:
        if isinstance(of, roles.Input) and shard.call.row_dims[of.index] is not None:
            raise StrategyError(
                f"forward changes argument {of.index} in place, and each rank has some of its "
                "rows: the others would stay as they are. Return the new value, or register it as "
                "a buffer."
            )


def _has_states(graph: CompiledGraph) -> bool:
    return any(isinstance(role, roles.State) for _, role in graph.unsaved_inputs)


def _tangent(
    graph: CompiledGraph, role: roles.Tangent, tangents: dict[int, torch.Tensor]
) -> torch.Tensor:
    """The gradient of an output with the strides that the graph expects; zeros if absent."""
    fake = graph.fake_tensors[role]
    if role.index not in tangents:
        device = next(iter(tangents.values())).device if tangents else fake.device
        return torch.zeros(fake.shape, dtype=fake.dtype, device=device)
    value = tangents[role.index]
    return value if value.stride() == fake.stride() else value.contiguous()
