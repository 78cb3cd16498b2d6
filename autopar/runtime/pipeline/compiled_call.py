"""`CompiledPipelineCall`: the stages of a rank and their schedules for one kind of call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import distributed as dist

from autopar.capture.trace import Capture
from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.roles import Gradient, MicrobatchPartial, Output, Parameter, StageOutput
from autopar.core.plan.layout import Layout
from autopar.core.plan.partition import NodeStrategies
from autopar.core.schedules import (
    SPLIT_SCHEDULES,
    Orders,
    orders,
    split_orders,
)
from autopar.errors import CoupledRowsError
from autopar.passes.communication.lower_collectives import LowerCollectives
from autopar.passes.core.node_builder import is_random, storage_owner
from autopar.passes.core.runner import run_passes
from autopar.passes.fold_views import fold_views
from autopar.passes.pipeline_parallel.accumulate_gradients import accumulate_gradients
from autopar.passes.pipeline_parallel.split_dgrad_wgrad import split_dgrad_wgrad
from autopar.passes.pipeline_parallel.split_messages import split_gathers, split_reductions
from autopar.passes.pipeline_parallel.split_stages import PipelineStages
from autopar.passes.registration import disabled_passes
from autopar.passes.split_forward_backward import split_forward_backward
from autopar.passes.stage_lowering import build_microbatch_pipelines, lower_stage, split_plan_stages
from autopar.runtime.codegen.absent_rows import AbsentRows, with_absent_rows
from autopar.runtime.codegen.program import CompiledGraph, LoweringOptions, generate
from autopar.runtime.pipeline.schedule import Schedule
from autopar.runtime.pipeline.stage import Stage, StageBackward, StageProgram

logger = logging.getLogger(__name__)


class TiedParameter(NamedTuple):
    """A parameter that several ranks of the pipeline have: one stores it."""

    name: str
    owner: int
    others: list[int]


class MicroBatchKind(NamedTuple):
    """Micro-batches of a call with equally many rows, by the capture of one."""

    rows: int
    capture: Capture
    op_strategies: Sequence[NodeStrategies]


@dataclass
class CompiledPipelineCall:
    """The stages of a rank and their schedules for one kind of call.

    Attributes:
        kinds: kinds of micro-batches: of those with most rows, and of the others.
        rows: rows of each micro-batch.
        group: process group along the pipeline, None if this rank has all stages.
        capture: the captured call of the last micro-batch.
        graphs: graphs of all stages, for the last micro-batch.
        prologues: compute partials of each micro-batch from its inputs; () if there are none.
        epilogue: computes results and new values of buffers from batch totals.
    """

    kinds: InitVar[Sequence[MicroBatchKind]]
    rows: Sequence[int]
    options: LoweringOptions
    device: torch.device
    group: dist.ProcessGroup | None

    def __post_init__(self, kinds: Sequence[MicroBatchKind]) -> None:
        options, count = self.options, self.micro_batches
        plan, rank = options.plan, options.rank
        assert plan.pipeline is not None
        self.pipeline, self.mesh_coordinate = plan.pipeline, Layout(plan).coordinate(rank)
        self.pp_rank = self.mesh_coordinate.get("pp", 0)
        by_rows = {kind.rows: kind for kind in kinds}
        graphs = {
            rows: split_plan_stages(kind.capture.graph, plan, rank, kind.op_strategies, count)
            for rows, kind in by_rows.items()
        }
        _check_alike(*graphs.values())
        last = self.rows[-1]
        self.graphs, self.stages = graphs[last], {}
        self.capture = _without_absent(by_rows[last].capture, self.graphs)
        for index in self.pipeline.stages_of(self.pp_rank):
            programs = {
                rows: _build_stage(each.stages[index], options, count)
                for rows, each in graphs.items()
            }
            self.stages[index] = Stage(index, [programs[rows] for rows in self.rows])
        prologues = {
            rows: _build_prologue_or_epilogue(each.prologue, options)
            for rows, each in graphs.items()
            if each.prologue is not None
        }
        self.prologues = [prologues[rows] for rows in self.rows] if prologues else []
        self.epilogue = _build_prologue_or_epilogue(self.graphs.epilogue, options)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return len(self.rows)

    @cached_property
    def untrained(self) -> frozenset[int]:
        """Outputs of stages beside a loss, which the loop may never read; the model keeps none."""
        stages, tangents = self.graphs.output_stage, self.graphs.tangents
        nodes = {i: self.graphs.stages[s].result(Output(i)) for i, s in stages.items()}
        return frozenset(
            index
            for index, node in nodes.items()
            if tangents and index not in tangents | self.capture.assigned_outputs
            if node is not None and storage_owner(node).op == "call_function"
        )

    @cached_property
    def outputs_by_gradient(self) -> Mapping[str | int, frozenset[int]]:
        return self.capture.graph.outputs_by_gradient()

    @cached_property
    def differentiates(self) -> bool:
        return any(isinstance(r, Gradient) for graph in self.graphs.stages for r in graph.outputs)

    @cached_property
    def is_random(self) -> bool:
        """Whether any rank draws random numbers."""
        return any(is_random(node) for graph in self.graphs.stages for node in graph.calls())

    @cached_property
    def fake_partials(self) -> dict[int, torch.Tensor]:
        """The fake tensor of each partial sum that stages return."""
        return {
            role.index: tensors(node)[0]
            for graph in self.graphs.stages
            for role, node in zip(graph.outputs, graph.results, strict=True)
            if isinstance(role, MicrobatchPartial) and node is not None
        }

    def _schedule(self, actions: Orders) -> Schedule:
        return Schedule(self.stages, actions, self.micro_batches, self.device, self.group)

    @cached_property
    def interleaved_schedule(self) -> Schedule:
        p = self.pipeline
        return self._schedule(orders(p.schedule, p.ranks, self.micro_batches, p.stages_per_rank))

    @cached_property
    def split_schedules(self) -> tuple[Schedule, Schedule]:
        """The schedules of all forwards, and of all backwards after them."""
        p = self.pipeline
        forward, backward = split_orders(p.schedule, p.ranks, self.micro_batches, p.stages_per_rank)
        return self._schedule(forward), self._schedule(backward)

    # Parameters that other ranks of the pipeline than their owners read, or have gradients of.

    def _others(self, has: Callable[[TrainingGraph, Parameter], bool]) -> list[TiedParameter]:
        """The parameters that ranks other than the owner have, by their stages' graphs."""
        found, rank_of = [], self.pipeline.rank_of
        for name, stage in self.pipeline.owners.items():
            role, owner = Parameter(name), rank_of(stage)
            ranks = {rank_of(i) for i, graph in enumerate(self.graphs.stages) if has(graph, role)}
            if others := sorted(ranks - {owner}):
                found.append(TiedParameter(name, owner, others))
        return found

    @cached_property
    def _read_elsewhere(self) -> list[TiedParameter]:
        return self._others(lambda graph, role: role in graph.inputs)

    @cached_property
    def _trained_elsewhere(self) -> list[TiedParameter]:
        """Parameters whose gradients others compute: users, and the last stage the loss's own."""
        return self._others(lambda graph, role: graph.result(Gradient(role)) is not None)

    def send_tied_params(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sends parameters from their owners to other users; returns the received ones."""
        received, transfers = {}, []
        for name, owner, users in self._read_elsewhere:
            if self.pp_rank == owner:
                value = parameters[name].contiguous()
                transfers += [dist.isend(value, group=self.group, group_dst=u) for u in users]
            elif self.pp_rank in users:
                role = Parameter(name)
                fakes = (s.programs[0].forward.fake_tensors for s in self.stages.values())
                fake = next(table[role] for table in fakes if role in table)
                value = torch.empty(fake.shape, dtype=fake.dtype, device=self.device)
                received[name] = value
                transfers.append(dist.irecv(value, group=self.group, group_src=owner))
        _wait(transfers)
        return received

    def reduce_tied_grads(
        self, parameters: Mapping[str, torch.Tensor], gradients: dict[str, torch.Tensor]
    ) -> None:
        """Sends local gradients of tied parameters to their owners, which add them up."""
        received, transfers = [], []
        for name, owner, others in self._trained_elsewhere:
            if self.pp_rank == owner:
                for other in others:
                    value = torch.empty_like(
                        parameters[name], memory_format=torch.contiguous_format
                    )
                    transfers.append(dist.irecv(value, group=self.group, group_src=other))
                    received.append((name, value))
            elif self.pp_rank in others:
                value = gradients.pop(name).contiguous()
                transfers.append(dist.isend(value, group=self.group, group_dst=owner))
        _wait(transfers)
        for name, value in received:
            gradients[name] = gradients[name] + value if name in gradients else value


def _without_absent(capture: Capture, graphs: PipelineStages) -> Capture:
    """A capture with stand-ins for outputs that the graphs of a pipeline leave out."""
    returned = {role for graph in (*graphs.stages, graphs.epilogue) for role in graph.outputs}
    leaves = with_absent_rows(capture.leaves, capture.graph, returned)
    pairs = zip(capture.tensor_leaves, leaves, strict=True)
    present = tuple(flag and not isinstance(leaf, AbsentRows) for flag, leaf in pairs)
    return replace(capture, leaves=leaves, tensor_leaves=present)


def _check_alike(first: PipelineStages, *others: PipelineStages) -> None:
    """Raises CoupledRowsError unless micro-batches of other sizes give values that add up."""
    for other in others:
        if _described(first) != _described(other):
            raise CoupledRowsError(
                "the operators of forward depend on the number of rows, so micro-batches of other "
                "sizes do not add up: give a batch that micro_batches divides"
            )


def _described(stages: PipelineStages) -> list[str]:
    """Values that leave the stages for the loop, and those summed over micro-batches."""
    graphs = [*stages.stages, *([stages.prologue] if stages.prologue is not None else [])]
    lines = [f"epilogue {[str(node.target) for node in stages.epilogue.calls()]}"]
    for place, graph in enumerate(graphs):
        for role, node in zip(graph.outputs, graph.results, strict=True):
            if node is None or isinstance(role, StageOutput):
                continue
            dims = (node.meta.get("batch_dims") or ((),))[0]
            shape = [s for d, s in enumerate(tensors(node)[0].shape) if d not in dims]
            lines.append(f"{place} {role} {shape} {dims}")
    return sorted(lines)


def _wait(transfers: Sequence[dist.Work | None]) -> None:
    for transfer in transfers:
        assert transfer is not None
        transfer.wait()


def _build_stage(
    graph: TrainingGraph, options: LoweringOptions, micro_batches: int
) -> StageProgram:
    """Lowers the graph of a stage and generates its functions."""
    passes = build_microbatch_pipelines(
        graph,
        options.plan,
        options.rank,
        options.comm_backend,
        micro_batches=micro_batches,
        hold=options.no_sync,
        held=options.unreduced,
        compiled=options.is_compiled,
        disable=disabled_passes(),
    )
    logger.debug("passes of a stage of rank %d:\n%s", options.rank, passes[0])
    lowered = lower_stage(graph, passes, options.plan, micro_batches)
    if not options.is_compiled:
        lowered = type(lowered)(*lowered.of_each(fold_views))
    last = split_forward_backward(lowered.last)
    forward = generate(last.forward, options)
    if micro_batches == 1:
        last_backward = _backward(last.backward, options, accumulates=False)
        return StageProgram(None, forward, forward, None, None, last_backward)
    gathers, first_forward = None, forward
    if lowered.first is not lowered.more:
        first = split_forward_backward(lowered.first).forward
        # a compiled function may write over what it still sends at its end
        ahead, first = (None, first) if options.is_compiled else split_gathers(first)
        gathers = None if ahead is None else generate(ahead, options)
        first_forward = generate(first, options)
    all_same = lowered.more is lowered.last
    middle = last if all_same else split_forward_backward(lowered.more)
    first_backward = _backward(middle.backward, options, accumulates=False)
    middle_backward = _backward(middle.backward, options, accumulates=True)
    last_backward = middle_backward
    if not all_same:
        last_backward = _backward(last.backward, options, accumulates=True)
    backwards = first_backward, middle_backward, last_backward
    return StageProgram(gathers, first_forward, forward, *backwards)


def _backward(
    graph: TrainingGraph | None, options: LoweringOptions, *, accumulates: bool
) -> StageBackward | None:
    if graph is None:
        return None
    graph = accumulate_gradients(graph) if accumulates else graph
    assert options.plan.pipeline is not None
    splits = options.plan.pipeline.schedule in SPLIT_SCHEDULES
    parts = [*split_dgrad_wgrad(graph)] if splits else [graph]
    finish = None
    if not options.is_compiled:  # as for gathers
        parts[-1], finish = split_reductions(parts[-1])
    made = tuple(generate(part, options) for part in parts)
    return StageBackward(graph, made, None if finish is None else generate(finish, options))


def _build_prologue_or_epilogue(graph: TrainingGraph, options: LoweringOptions) -> CompiledGraph:
    """Lowers and generates a graph that runs once per call."""
    coordinate = Layout(options.plan).coordinate(options.rank)
    lower = [
        LowerCollectives(options.comm_backend, coordinate[axis], axis)
        for axis, size in options.plan.mesh
        if size > 1 and axis != "pp"
    ]
    return generate(run_passes(graph, lower), replace(options, compile_backend="eager"))
