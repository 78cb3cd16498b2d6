"""`PipelineExecutor`: runs calls of a model with pipeline stages."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch

from autopar._torch import backward_keeps_graph
from autopar.capture.call import BatchShard, UnevenRowsError
from autopar.core.common.bounded_cache import BoundedCache, paused_collector
from autopar.core.common.notices import NumericsNote, warn_of_notes, warn_once
from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.plan.plan import Plan
from autopar.errors import AutoparWarning, CoupledRowsError, StrategyError
from autopar.runtime.agreement.consensus import run_on_all_ranks
from autopar.runtime.agreement.ragged import RECOMPUTE_ADVICE, check_collectives, have_all
from autopar.runtime.agreement.strategies import PlannedStrategies
from autopar.runtime.agreement.transforms import tell_of_saved_tensors_hooks
from autopar.runtime.border.first_derivative import differentiable_once
from autopar.runtime.border.gradient_hooks import leave_out_hooks
from autopar.runtime.border.results import results_of
from autopar.runtime.codegen.program import untouched
from autopar.runtime.codegen.surroundings import apart_from_hooks
from autopar.runtime.context import ExecutionContext
from autopar.runtime.parameters.sharded_view import version_of
from autopar.runtime.parameters.whole_gradient import whole_gradient
from autopar.runtime.pipeline.call import PipelineCall, Scalar
from autopar.runtime.pipeline.compiled_call import CompiledPipelineCall, MicroBatchKind
from autopar.runtime.tracing.earlier_modes import as_called

LATE_SCALE = NumericsNote(
    "a pipeline begins its backward before loss.backward(), with the loss scale of the last step: "
    "in fp16 its first backward is not scaled, and an overflow skips one more step than on one "
    "device. bf16 needs no scale."
)


@dataclass
class PipelineExecutor:
    """Runs calls of a module whose plan has pipeline stages.

    Attributes:
        counts: number of micro-batches of each kind of call.
    """

    context: ExecutionContext
    compiled_calls: BoundedCache[CompiledPipelineCall] = field(default_factory=BoundedCache)
    counts: dict[Any, int] = field(default_factory=dict)
    loss_tangent: Scalar = 1.0  # of the previous loss

    @property
    def plan(self) -> Plan:
        assert self.context.plan is not None
        return self.context.plan

    def run(self, shard: BatchShard, no_sync: bool) -> Any:
        context = self.context
        call = self._call_of(shard, no_sync)
        compiled = call.compiled
        with context.rng.as_default(compiled.is_random), context.without_autocast():
            if compiled.differentiates:
                given = context.differentiable_inputs(shard)
                anchor = torch.zeros((), requires_grad=True)  # this rank may train nothing
                state = context.guards.state
                tell_of_saved_tensors_hooks(are_called=False)
                _check_anomaly_mode()
                try:
                    outputs = _PipelineFunction.apply(
                        self, call, tuple(given), state, *given.values(), anchor
                    )
                except BaseException:  # a checkpoint stops its second forward like this
                    context.write_buffers(call.updates, compiled.capture.rebound_buffers)
                    raise
            else:
                outputs = call.run_forward()
        context.write_buffers(call.updates, compiled.capture.rebound_buffers)
        return context.result_of(compiled.capture, call.returned, outputs)

    def _call_of(self, shard: BatchShard, no_sync: bool) -> PipelineCall:
        """A call in as many micro-batches as planned, or in fewer.

        Few rows have fewer. Where uneven ones need each other's rows, they are even; where these
        do too, all rows are one.
        """
        assert self.plan.pipeline is not None
        most, sizes = self.plan.pipeline.micro_batches, shard.slices.sizes
        key = (self.context.call_key(shard), torch.is_grad_enabled())
        known = self.counts.get(key)
        for count in dict.fromkeys((known or min(most, *sizes), gcd(most, *sizes))):
            micro_batches = shard.split_micro_batches(count)
            if known is None and not self._run_one_by_one(micro_batches):
                continue
            # both errors come on all ranks, before any has computed
            with contextlib.suppress(CoupledRowsError, UnevenRowsError):
                call = self._call(micro_batches, no_sync)
                self._count(key, count, min(sizes))
                return call
        self._count(key, 1, min(sizes))
        return self._call([shard], no_sync)

    def _count(self, key: Any, count: int, rows: int) -> None:
        """Keeps the number of micro-batches of a kind of call; warns if it is not the planned."""
        assert self.plan.pipeline is not None
        most = self.plan.pipeline.micro_batches
        if key not in self.counts and count < most and not self.context.options.on_trial:
            why = f"a rank has {rows} rows" if rows == count else "its rows cannot be divided more"
            warn_once(
                AutoparWarning,
                f"a call runs in {count} micro-batches instead of {most}, because {why}: ranks of "
                "the pipeline wait longer for each other than planned.",
            )
        self.counts[key] = count

    def _run_one_by_one(self, micro_batches: list[BatchShard]) -> bool:
        """Whether no micro-batch needs the rows of others before all forwards have run."""
        if len(micro_batches) == 1:
            return True
        try:
            with apart_from_hooks():
                for micro_batch in _of_each_size(micro_batches):
                    self.context.capture(micro_batch)
        except CoupledRowsError:
            return have_all(False)
        return have_all(True)

    def _call(self, micro_batches: list[BatchShard], no_sync: bool) -> PipelineCall:
        """A call; its stages and schedules are made once for each kind of call."""
        context, micro_batch = self.context, micro_batches[0]
        unreduced = () if no_sync else context.held_gradients.names
        key = context.call_key(micro_batch)
        key = (*key, torch.is_grad_enabled(), len(micro_batches), no_sync, unreduced)
        compiled = self.compiled_calls.get(key)
        if compiled is None:
            options = context.lowering_options(no_sync, unreduced)
            mesh = context.mesh
            has_pp = mesh is not None and "pp" in (mesh.mesh_dim_names or ())
            group = mesh.get_group("pp") if mesh is not None and has_pp else None
            with paused_collector(), apart_from_hooks():
                kinds = self._kinds(_of_each_size(micro_batches))
                rows = [each.rows for each in micro_batches]
                with context.without_autocast():
                    compiled = run_on_all_ranks(
                        lambda: CompiledPipelineCall(kinds, rows, options, context.device, group)
                    )
            programs = [p for stage in compiled.stages.values() for p in stage.programs]
            graphs = [graph for program in programs for graph in program.graphs]
            check_collectives(graphs, RECOMPUTE_ADVICE, stage=compiled.pp_rank)
            if not context.options.on_trial:
                for graph in compiled.graphs.stages:
                    warn_of_notes(graph.notes, trains=compiled.differentiates)
                if any(map(_computes_in_fp16, compiled.graphs.stages)):
                    warn_of_notes([LATE_SCALE], trains=True)
                context.tell_of_shapes(micro_batch)
            self.compiled_calls.add(key, compiled, context.options.max_programs)
        modes = key[0]
        return PipelineCall(compiled, context, micro_batches, no_sync, modes, self.loss_tangent)

    def _kinds(self, micro_batches: list[BatchShard]) -> list[MicroBatchKind]:
        """The kinds of micro-batches, by one of each size; all ranks call this at once."""
        kinds, planned = [], PlannedStrategies()
        for micro_batch in micro_batches:
            captured = self.context.capture_on_all_ranks(micro_batch)
            with self.context.without_autocast():
                op_strategies = self.context.op_strategies(captured, micro_batch, planned)
            kinds.append(MicroBatchKind(micro_batch.rows, captured, op_strategies))
        return kinds

    def rerun_with_all_tangents(self, call: PipelineCall, state: int) -> PipelineCall:
        """Runs the forward of a call again, so that every output can receive a gradient."""
        self.context.all_tangents = True
        context = self.context
        with context.guards.as_of(state), as_called(context, call.modes):
            again = self._call(list(call.micro_batches), call.no_sync)
        with context.without_autocast():
            again.run_forward()
        return again


def _of_each_size(micro_batches: list[BatchShard]) -> list[BatchShard]:
    """The first and the last one, which are of two sizes if those of any rank are."""
    is_even = len(micro_batches) == 1 or micro_batches[0].slices.is_even
    return micro_batches[:1] if is_even else [micro_batches[0], micro_batches[-1]]


def _computes_in_fp16(graph: TrainingGraph) -> bool:
    return any(t.dtype == torch.float16 for node in graph.calls() for t in tensors(node))


def _check_anomaly_mode() -> None:
    """Raises StrategyError if torch would look for NaN in gradients that other stages have."""
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise StrategyError(
            "torch.autograd.detect_anomaly looks for NaN in gradients that live on other stages of "
            "the pipeline. Give it check_nan=False, or leave pipeline stages out while you search."
        )


def _check_versions(ctx: Any) -> None:
    """Raises StrategyError if a parameter or input has changed since the call."""
    for key, tensor, version in zip(ctx.differentiable, ctx.operands, ctx.versions, strict=True):
        if version_of(tensor) != version:
            raise StrategyError(
                f"{key} was changed in place between a call and its backward, which would use the "
                "values of the call. Change parameters after the backward."
            )


class _PipelineFunction(torch.autograd.Function):
    """The forward and backward of one call."""

    @staticmethod
    def forward(
        ctx: Any,
        executor: PipelineExecutor,
        call: PipelineCall,
        differentiable: tuple[str | int, ...],
        state: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.executor, ctx.call, ctx.state = executor, call, state
        ctx.python = executor.context.guards.for_backward()
        ctx.versions = list(map(version_of, tensors[:-1]))
        ctx.differentiable, ctx.operands = differentiable, tensors[:-1]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tensors[-1])  # what a checkpoint around the model asks for
        outputs = call.run_forward()
        flags = [call.compiled.capture.differentiable[index] for index in call.returned]
        outputs = results_of(outputs, flags, (t for each in call.saved.values() for t in each))
        ctx.mark_non_differentiable(
            *[o for o, trains in zip(outputs, flags, strict=True) if not trains]
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Runs the backwards, or collects the gradients of interleaved ones."""
        call, executor = ctx.call, ctx.executor
        differentiates_again = torch.is_grad_enabled()  # create_graph=True
        executor.context.guards.check_backward(ctx.python)
        _check_versions(ctx)
        _ = ctx.saved_tensors  # a checkpoint runs the forward again: statistics are taken twice
        pairs = zip(call.returned, gradients, strict=True)
        tangents = {i: whole_gradient(gradient) for i, gradient in pairs if gradient is not None}
        if not call.compiled.graphs.tangents.issuperset(tangents):
            call = executor.rerun_with_all_tangents(call, ctx.state)
        retain_graph = backward_keeps_graph()
        with executor.context.turn, torch.no_grad():
            call.run_backward(tangents, retain_graph)
        if call.interleaves_backward and tangents:
            executor.loss_tangent = call.next_loss_tangent
        # A call that no_sync holds back, or after one, has gradients of others in its own.
        is_alone = not call.no_sync and not executor.context.held_gradients.names
        by_gradient = call.compiled.outputs_by_gradient if is_alone else {}
        absent = untouched(by_gradient, tangents)
        found: list[torch.Tensor | None] = []
        for key in ctx.differentiable:
            if isinstance(key, str):
                gradient = call.take_gradient(key, retain_graph)
                gradient = None if key in absent else gradient
                context = executor.context
                found.append(None if gradient is None else context.as_grad_of(key, gradient))
            else:
                found.append(call.input_gradient(key))
        leave_out_hooks(ctx.operands, found)
        results: tuple[torch.Tensor | None, ...] = tuple(found)
        if differentiates_again:
            reason = "a pipeline has no second derivative"
            results = differentiable_once(results, (*ctx.operands, *gradients), reason)
        return (None, None, None, None, *results, None)
