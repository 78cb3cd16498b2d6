"""Calls of a model that each rank runs as a whole: each kind of call is lowered once, then run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.capture.batch_shards import BatchShard
from autopar.common.notices import warn_of_numerics
from autopar.ir.roles import BatchChecksum, BatchFraction, BatchIndex, Buffer, Input, Parameter
from autopar.runtime.agreement.channel import finish_exchange
from autopar.runtime.batch_checks import (
    batch_checksum,
    check_checksum_sum,
    check_model_parallel_peers,
)
from autopar.runtime.call_partitions import call_strategies
from autopar.runtime.codegen.program import CompiledGraph, Program, build_program, with_axes
from autopar.runtime.context import ExecutionContext
from autopar.runtime.parameters.distribute import local_part
from autopar.runtime.process_groups import backend_of, rank
from autopar.runtime.spmd.autograd import SpmdCall, SpmdFunction, run_forward
from autopar.runtime.written import result_of


@dataclass
class SpmdExecutor:
    """Runs the calls of a module whose plan has no stages.

    Attributes:
        setting: what they share.
        programs: of each kind of call.
    """

    context: ExecutionContext
    programs: dict[Any, Program] = field(default_factory=dict)

    def run(self, leaves: list[Any], share: BatchShard, hold: bool) -> Any:
        """The result of a call.

        Args:
            leaves: the flattened arguments.
            share: this rank's rows of them.
            hold: keep gradients on this rank.
        """
        setting, program = self.context, self._program(share, hold)
        state = setting.guards.state
        running = SpmdCall(
            program,
            lambda program: self._arguments(program, leaves, share),
            differentiable=(),
            backward_half=lambda p: self._backward(p, share, hold, state),
            program_with_all_tangents=lambda: self._general(share, hold, state),
            unreduced_grads=setting.unreduced_grads,
            compression_state=setting.compression_state,
            as_grad_of=setting.as_grad_of,
            updates={},
        )
        with setting.rng.as_default(program.is_random), setting.without_autocast():
            if program.backward is None:
                with torch.no_grad():
                    outputs = run_forward(running, program)[0]
            else:
                running.differentiable, tensors = setting.differentiable_inputs(share)
                outputs = SpmdFunction.apply(running, *tensors)
        finish_exchange()  # there may have been no collective
        self._finish(running, share, program.capture.rebound_buffers)
        result = list(program.capture.leaves)
        for index, value in zip(program.returned, outputs, strict=True):
            result[index] = value
        return result_of(program.capture, result, setting.model)

    def _program(
        self, share: BatchShard, hold: bool = False, held: tuple[str, ...] = ()
    ) -> Program:
        setting, plan = self.context, self.context.plan
        assert plan is not None
        key = (*setting.call_key(share), torch.is_grad_enabled(), hold, held)
        if key not in self.programs:
            captured = setting.capture_on_all_ranks(share)
            graph, op_strategies = with_axes(captured.graph, plan), setting.make_strategies
            self.programs[key] = build_program(
                captured,
                plan,
                rank=rank(),
                op_strategies=call_strategies(
                    graph, plan, rank(), share.global_rows, share.num_slices, op_strategies
                ),
                comm_backend=backend_of(setting.device),
                groups=setting.groups,
                compile_backend=setting.options.backend,
                hold=hold,
                held=held,
                recorder=setting.options.recorder,
            )
            if not setting.options.on_trial:
                warn_of_numerics(self.programs[key].graph.notes)
        return self.programs[key]

    def _arguments(self, program: Program, leaves: list[Any], share: BatchShard) -> list[Any]:
        setting = self.context
        named, buffers = setting.index.parameters, setting.index.buffers()
        inputs = dict(zip(share.call.tensor_indices, share.tensors, strict=True))
        values: list[Any] = []
        for role in program.forward.inputs:
            match role:
                case Parameter(name):
                    values.append(local_part(named[name]).detach())
                case Buffer(name):
                    values.append(buffers[name])
                case Input(index):
                    values.append(inputs[index].detach())
                case BatchFraction():
                    weight = share.rows / share.global_rows
                    values.append(torch.tensor(weight, dtype=torch.float64, device=setting.device))
                case BatchIndex():
                    values.append(share.slices.unit_indices(setting.device))
                case BatchChecksum(axis):
                    mode = "global" if axis else setting.options.batch
                    values.append(batch_checksum(leaves, share.rows, mode, setting.device))
        return values

    def _backward(
        self, program: Program, share: BatchShard, hold: bool, state: int
    ) -> CompiledGraph:
        """The backward that adds what is held at the time that it runs."""
        if hold or not self.context.unreduced_grads:
            half = program.backward
        else:
            with torch.enable_grad(), self.context.guards.as_of(state):
                half = self._program(
                    share, False, tuple(sorted(self.context.unreduced_grads))
                ).backward
        assert half is not None
        return half

    def _general(self, share: BatchShard, hold: bool, state: int) -> Program:
        """The call with gradients entering by every output, from now on."""
        self.context.all_tangents = True
        with torch.enable_grad(), self.context.guards.as_of(state):
            return self._program(share, hold)

    def _finish(self, running: SpmdCall, share: BatchShard, rebound: frozenset[str]) -> None:
        options = self.context.options
        for axis, verdict in running.checksum_sums.items():
            if axis:
                check_model_parallel_peers(verdict, options.model_parallel_size)
            else:
                check_checksum_sum(verdict, options.dp_size, options.batch)
        buffers = self.context.index.buffers()
        inputs = dict(zip(share.call.tensor_indices, share.tensors, strict=True))
        with torch.no_grad():
            for of, value in running.updates.items():
                if isinstance(of, Buffer) and of.name in rebound:
                    self.context.rebind(of.name, value.clone())
                    continue
                target = buffers[of.name] if isinstance(of, Buffer) else inputs[of.index]
                target.copy_(value)
        running.updates.clear()  # the caller may hold the loss, and by it all this, for a step more
