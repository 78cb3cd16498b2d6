"""Calls of a pipelined model: each kind of call is cut and lowered once, then run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd, isfinite
from typing import Any

import torch
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from autopar._torch import backward_keeps_graph
from autopar.capture.batch_shards import BatchShard
from autopar.common.notices import warn_of_numerics
from autopar.errors import CoupledRowsError
from autopar.ir.mesh_levels import DATA_AXIS
from autopar.ir.roles import Differentiable, Input, Parameter
from autopar.report.plan import Plan
from autopar.runtime.batch_checks import (
    batch_checksum,
    check_checksum_sum,
    check_model_parallel_peers,
)
from autopar.runtime.call_partitions import call_strategies
from autopar.runtime.codegen.program import with_axes
from autopar.runtime.context import ExecutionContext
from autopar.runtime.parameters.distribute import is_remote, local_part
from autopar.runtime.pipeline.call import PipelineCall
from autopar.runtime.pipeline.compiled_call import CompiledPipelineCall
from autopar.runtime.pipeline.stage_parameters import apply_requires_grad_flags, requires_grad_flags
from autopar.runtime.pipeline.stage_program import build_pipeline_program
from autopar.runtime.process_groups import backend_of, explaining_comm_errors, rank
from autopar.runtime.written import result_of


@dataclass
class PipelineExecutor:
    """Runs the calls of a module whose plan has stages.

    Attributes:
        setting: what they share.
        known: what runs each kind of call.
        coupled: kinds of calls whose micro-batches need each other's rows.
        tangent: the gradient of the last loss.
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

    def run(self, leaves: Sequence[Any], share: BatchShard, hold: bool) -> Any:
        """The result of a call, the same on every rank of the pipeline.

        Args:
            leaves: the flattened arguments.
            share: this rank's rows of them.
            hold: keep gradients on this rank.
        """
        self._agree(leaves, share)
        shares = self._shares(share)
        call = self._call(shares, hold)
        pipe = call.compiled
        setting = self.context
        with setting.rng.as_default(pipe.program.is_random), setting.without_autocast():
            if pipe.program.differentiates:
                roles, tensors = setting.differentiable_inputs(share)
                tensors.append(torch.zeros((), requires_grad=True))  # if nothing here is trained
                outputs = _Run.apply(
                    _Under(self, call, shares, hold, roles, setting.guards.state), *tensors
                )
            else:
                outputs = call.run()
        buffers = setting.index.buffers()
        with torch.no_grad():
            for name, value in call.updates.items():
                if name in pipe.program.capture.rebound_buffers:
                    setting.rebind(name, value.clone())
                else:
                    buffers[name].copy_(value)
        result = list(pipe.program.capture.leaves)
        for index, value in zip(call.returned, outputs, strict=True):
            result[index] = value
        return result_of(pipe.program.capture, result, setting.model)

    def _agree(self, leaves: Sequence[Any], share: BatchShard) -> None:
        """Ranks that share rows must have been given the same, before anything is sent.

        They also hear of what others have frozen of their stages.
        """
        ranks, data = self.plan.world_size, self.plan.dp_size
        if ranks == 1:
            return
        row = self.plan.mesh_coordinate(rank())[DATA_AXIS]
        device, parameters = self.context.device, self.context.index.parameters.values()
        speaks = rank() % (ranks // self.plan.pp_size) == 0
        flags = torch.tensor(
            requires_grad_flags(parameters, speaks=speaks), dtype=torch.float64, device=device
        )
        own = torch.zeros(data + 1, 4, dtype=torch.float64, device=device)
        own[row] = batch_checksum(leaves, share.rows, "global", device)
        own[data] = batch_checksum(leaves, share.rows, self.plan.batch, device)
        every = torch.cat([own.view(-1), flags])
        with explaining_comm_errors("a pipeline"):
            dist.all_reduce(every)
        verdicts = every[: own.numel()].view(own.shape)
        if self.plan.batch == "local":
            for verdict in verdicts[:data]:
                check_model_parallel_peers(verdict, ranks // data)
        check_checksum_sum(verdicts[data], ranks, self.plan.batch)
        apply_requires_grad_flags(parameters, every[own.numel() :].tolist())

    def _shares(self, share: BatchShard) -> list[BatchShard]:
        """The micro-batches of a share; the whole share where they need each other's rows."""
        shares = share.split_micro_batches(self._micro_batches(share))
        key = (self.context.call_key(shares[0]), torch.is_grad_enabled())
        if len(shares) > 1 and key not in self.coupled_keys:
            try:
                self.context.capture(shares[0])
            except CoupledRowsError:
                self.coupled_keys.add(key)
        return [share] if key in self.coupled_keys else shares

    def _micro_batches(self, share: BatchShard) -> int:
        """As many as planned; fewer for a smaller batch that these do not divide."""
        assert self.plan.pipeline is not None
        planned, rows = self.plan.pipeline.micro_batches, share.rows
        if rows * share.num_slices != share.global_rows:
            return 1
        return gcd(planned, rows) if rows < self.plan.pipeline.rows else planned

    def _call(self, shares: list[BatchShard], hold: bool) -> PipelineCall:
        pipe = self._pipe(shares[0], len(shares), hold)
        inside = self.context.index  # a capture may add to what it holds
        return PipelineCall(
            pipe,
            shares,
            {n: local_part(p).detach() for n, p in inside.parameters.items() if not is_remote(p)},
            inside.buffers(),
            self.context.unreduced_grads,
            self.context.compression_state,
            hold,
            self.loss_tangent,
        )

    def _pipe(self, share: BatchShard, count: int, hold: bool) -> CompiledPipelineCall:
        """What runs calls in so many micro-batches, of which `share` is one."""
        held = () if hold else tuple(sorted(self.context.unreduced_grads))
        key = (*self.context.call_key(share), torch.is_grad_enabled(), count, hold, held)
        if key not in self.compiled_calls:
            captured = self.context.capture_on_all_ranks(share)
            graph, op_strategies = (
                with_axes(captured.graph, self.plan),
                self.context.make_strategies,
            )
            program = build_pipeline_program(
                captured,
                self.plan,
                rank=rank(),
                op_strategies=call_strategies(
                    graph, self.plan, rank(), share.global_rows, share.num_slices, op_strategies
                ),
                micro_batches=count,
                comm_backend=backend_of(self.context.device),
                groups=self.context.groups,
                compile_backend=self.context.options.backend,
                hold=hold,
                held=held,
            )
            for stage in program.split.stages:
                if not self.context.options.on_trial:
                    warn_of_numerics(stage.notes)
            mesh, group = self.context.mesh, None
            if mesh is not None and "pp" in (mesh.mesh_dim_names or ()):
                group = mesh.get_group("pp")
            self.compiled_calls[key] = CompiledPipelineCall(
                program, self.plan, rank(), self.context.device, group
            )
        return self.compiled_calls[key]

    def rerun_with_all_tangents(
        self, shares: list[BatchShard], hold: bool, state: int
    ) -> PipelineCall:
        """A call again, up to its backward, with gradients entering by every output."""
        self.context.all_tangents = True
        with torch.enable_grad(), self.context.guards.as_of(state):
            call = self._call(shares, hold)
        call.run()
        return call


@dataclass
class _Under:
    """A call inside autograd."""

    pipes: PipelineExecutor
    call: PipelineCall
    shares: list[BatchShard]
    hold: bool
    roles: tuple[Differentiable, ...]
    state: int


class _Run(torch.autograd.Function):
    """The forward and backward of one call, as autograd sees them."""

    @staticmethod
    def forward(ctx: Any, under: _Under, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the schedule, or its forwards."""
        ctx.under = under
        ctx.set_materialize_grads(False)
        call = under.call
        outputs = call.run()
        flags = call.compiled.program.capture.differentiable
        pairs = zip(outputs, call.returned, strict=True)
        ctx.mark_non_differentiable(*(value for value, index in pairs if not flags[index]))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Runs the backwards, or takes what they gave."""
        under: _Under = ctx.under
        call, pipes = under.call, under.pipes
        pairs = zip(call.returned, gradients, strict=True)
        given = {index: gradient for index, gradient in pairs if gradient is not None}
        if not call.compiled.tangents.issuperset(given):
            call = pipes.rerun_with_all_tangents(under.shares, under.hold, under.state)
        again = backward_keeps_graph()
        call.backward(given, again)
        if call.at_once and given:
            pipes.loss_tangent = (
                call.loss_tangent if isfinite(call.loss_tangent) and call.loss_tangent else 1.0
            )
        found: list[torch.Tensor | None] = []
        for role in under.roles:
            match role:
                case Parameter(name):
                    gradient = call.take_gradient(name, again)
                    found.append(
                        None if gradient is None else pipes.context.as_grad_of(name, gradient)
                    )
                case Input(index):
                    found.append(call.input_gradient(index, _like(under.shares, index)))
        return (None, *found, None)


def _like(shares: list[BatchShard], index: int) -> torch.Tensor:
    """A tensor like the rank's rows of an argument."""
    parts = [dict(zip(s.call.tensor_indices, s.tensors, strict=True))[index] for s in shares]
    split = shares[0].call.has_batch_dim[index] and len(shares) > 1
    return torch.zeros_like(torch.cat(parts) if split else parts[0])
