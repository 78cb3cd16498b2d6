"""`SpmdExecutor`: runs calls of a model without pipeline stages."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.capture.call import BatchShard
from autopar.common.notices import warn_of_numerics
from autopar.ir.roles import Buffer, Input
from autopar.runtime.agreement.channel import finish_exchange
from autopar.runtime.batch_checks import check_checksum_sum, check_model_parallel_peers
from autopar.runtime.codegen.program import Program, build_program
from autopar.runtime.context import ExecutionContext
from autopar.runtime.spmd.autograd import SpmdCall, SpmdFunction
from autopar.runtime.written import result_of


@dataclass
class SpmdExecutor:
    """Runs calls of a module whose plan has no pipeline stages.

    Attributes:
        context: state shared by all calls.
        programs: program of each kind of call.
    """

    context: ExecutionContext
    programs: dict[Any, Program] = field(default_factory=dict)

    def run(self, leaves: Sequence[Any], shard: BatchShard, no_sync: bool) -> Any:
        """Runs a call and returns its result.

        Args:
            leaves: flattened arguments.
            shard: this rank's rows of the arguments.
            no_sync: whether gradients stay unreduced.
        """
        context, program = self.context, self._program(shard, no_sync)
        get_program, state = functools.partial(self._program, shard), context.guards.state
        call = SpmdCall(context, leaves, shard, no_sync, state, get_program, program)
        with context.rng.as_default(program.is_random), context.without_autocast():
            if program.backward is None:
                with torch.no_grad():
                    outputs = call.run_forward(program)[0]
            else:
                call.differentiable, tensors = context.differentiable_inputs(shard)
                outputs = SpmdFunction.apply(call, *tensors)
        finish_exchange()  # the program may have no collective
        self._check_batches(call)
        self._write_updates(call)
        result = list(program.capture.leaves)
        for index, value in zip(program.returned, outputs, strict=True):
            result[index] = value
        return result_of(program.capture, result, context.model)

    def _program(
        self, shard: BatchShard, no_sync: bool, unreduced: tuple[str, ...] = ()
    ) -> Program:
        context = self.context
        key = (*context.call_key(shard), torch.is_grad_enabled(), no_sync, unreduced)
        if key not in self.programs:
            captured = context.capture_on_all_ranks(shard)
            self.programs[key] = build_program(
                captured,
                context.op_strategies(captured, shard),
                context.lowering_options(no_sync, unreduced),
                context.options.recorder,
            )
            if not context.options.on_trial:
                warn_of_numerics(self.programs[key].graph.notes)
        return self.programs[key]

    def _check_batches(self, call: SpmdCall) -> None:
        options = self.context.options
        for axis, total in call.checksum_sums.items():
            if axis:
                check_model_parallel_peers(total, options.model_parallel_size)
            else:
                check_checksum_sum(total, options.dp_size, options.batch)

    def _write_updates(self, call: SpmdCall) -> None:
        """Writes new values of buffers and inputs."""
        buffers = {of.name: value for of, value in call.updates.items() if isinstance(of, Buffer)}
        self.context.write_buffers(buffers, call.program.capture.rebound_buffers)
        inputs = dict(zip(call.shard.call.tensor_indices, call.shard.tensors, strict=True))
        with torch.no_grad():
            for of, value in call.updates.items():
                if isinstance(of, Input):
                    inputs[of.index].copy_(value)
        call.updates.clear()  # the loss keeps the call alive
