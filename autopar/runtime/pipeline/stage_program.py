"""`PipelineProgram`: the generated code of a rank's stages for a captured call."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.capture.trace import Capture
from autopar.ir.graph import TrainingGraph
from autopar.ir.roles import Gradient, Parameter, Saved
from autopar.passes.communication.lower_collectives import LowerCollectives
from autopar.passes.core.node_builder import is_random
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline_parallel.accumulate_gradients import accumulate_gradients
from autopar.passes.pipeline_parallel.split_dgrad_wgrad import split_dgrad_wgrad
from autopar.passes.pipeline_parallel.split_stages import PipelineStages
from autopar.passes.registration import disabled_passes
from autopar.passes.split_forward_backward import split_forward_backward
from autopar.passes.stage_lowering import build_microbatch_pipelines, lower_stage, split_plan_stages
from autopar.plan.partition import NodeStrategies
from autopar.plan.pipeline import Pipeline
from autopar.runtime.codegen.program import CompiledGraph, LoweringOptions, generate

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageBackward:
    """The backward of a stage.

    Attributes:
        graph: the whole backward.
        parts: one function, or one for input gradients and one for parameter gradients.
    """

    graph: TrainingGraph
    parts: tuple[CompiledGraph, ...]

    @property
    def saved(self) -> list[Saved]:
        """Roles of the saved tensors, in the order in which the forward returns them."""
        return [role for role in self.graph.inputs if isinstance(role, Saved)]


@dataclass(frozen=True)
class StageProgram:
    """The functions of one stage.

    Attributes:
        first_forward: forward of the first micro-batch; it may gather parameters for all.
        forward: forward of the other micro-batches.
        first_backward: backward of the first of several micro-batches.
        middle_backward: backward of those in between, which accumulates gradients.
        last_backward: backward of the last, which also reduces accumulated gradients.
    """

    first_forward: CompiledGraph
    forward: CompiledGraph
    first_backward: StageBackward | None
    middle_backward: StageBackward | None
    last_backward: StageBackward | None


@dataclass(frozen=True)
class PipelineProgram:
    """The generated code of a rank for a call of a pipeline.

    Attributes:
        capture: the captured call of one micro-batch.
        micro_batches: number of micro-batches.
        graphs: graphs of all stages.
        stages: functions of this rank's stages, by index.
        prologue: computes partials from the inputs, None if there are none.
        epilogue: computes results and new values of buffers from batch totals.
    """

    capture: Capture
    micro_batches: int
    graphs: PipelineStages
    stages: Mapping[int, StageProgram]
    prologue: CompiledGraph | None
    epilogue: CompiledGraph

    @cached_property
    def differentiates(self) -> bool:
        """Whether there is a backward."""
        return any(isinstance(r, Gradient) for graph in self.graphs.stages for r in graph.outputs)

    @cached_property
    def is_random(self) -> bool:
        """Whether any rank draws random numbers."""
        return any(is_random(node) for graph in self.graphs.stages for node in graph.calls())

    def users_of(self, name: str) -> list[int]:
        """The stages that use a parameter."""
        graphs = enumerate(self.graphs.stages)
        return [stage for stage, graph in graphs if Parameter(name) in graph.inputs]


@dataclass(frozen=True)
class _StageBuilder:
    """Generates the functions of stages.

    Attributes:
        options: options of lowering.
        pipeline: the pipeline of the plan.
        micro_batches: number of micro-batches.
    """

    options: LoweringOptions
    pipeline: Pipeline
    micro_batches: int

    def stage(self, graph: TrainingGraph) -> StageProgram:
        """The functions of a stage."""
        options = self.options
        passes = build_microbatch_pipelines(
            graph,
            options.plan,
            options.rank,
            options.comm_backend,
            micro_batches=self.micro_batches,
            hold=options.no_sync,
            held=options.unreduced,
            compiled=options.is_compiled,
            disable=disabled_passes(),
        )
        logger.debug("passes of a stage of rank %d:\n%s", options.rank, passes[0])
        lowered = lower_stage(graph, passes, options.plan, self.micro_batches)
        last = split_forward_backward(lowered.last)
        forward = self._compiled(last.forward)
        if self.micro_batches == 1:
            last_backward = self._backward(last.backward, accumulates=False)
            return StageProgram(forward, forward, None, None, last_backward)
        gathers_first = lowered.first is not lowered.more
        first_forward = (
            self._compiled(split_forward_backward(lowered.first).forward)
            if gathers_first
            else forward
        )
        all_same = lowered.more is lowered.last
        middle = last if all_same else split_forward_backward(lowered.more)
        first_backward = self._backward(middle.backward, accumulates=False)
        middle_backward = self._backward(middle.backward, accumulates=True)
        last_backward = (
            middle_backward if all_same else self._backward(last.backward, accumulates=True)
        )
        return StageProgram(first_forward, forward, first_backward, middle_backward, last_backward)

    def _backward(self, graph: TrainingGraph | None, *, accumulates: bool) -> StageBackward | None:
        if graph is None:
            return None
        graph = accumulate_gradients(graph) if accumulates else graph
        splits = self.pipeline.schedule == "zero_bubble"
        parts = split_dgrad_wgrad(graph) if splits else (graph,)
        return StageBackward(graph, tuple(self._compiled(part) for part in parts))

    def _compiled(self, graph: TrainingGraph) -> CompiledGraph:
        return CompiledGraph(
            graph, generate(graph, self.options.groups, self.options.compile_backend)
        )

    def prologue_or_epilogue(self, graph: TrainingGraph) -> CompiledGraph:
        """The function of a prologue or epilogue."""
        options, plan = self.options, self.options.plan
        coordinate = plan.mesh_coordinate(options.rank)
        lower = [
            LowerCollectives(options.comm_backend, coordinate[axis], axis)
            for axis, size in plan.mesh
            if size > 1 and axis != "pp"
        ]
        lowered = run_passes(graph, lower)
        return CompiledGraph(lowered, generate(lowered, options.groups, "eager"))


def build_pipeline_program(
    capture: Capture,
    op_strategies: Sequence[NodeStrategies],
    options: LoweringOptions,
    micro_batches: int,
) -> PipelineProgram:
    """Lowers the capture of a micro-batch and generates the code of a rank's stages.

    Args:
        capture: the captured call of one micro-batch.
        op_strategies: strategies of the nodes for each partitioned axis.
        options: options of lowering, with a pipeline in the plan.
        micro_batches: number of micro-batches.
    """
    plan, rank = options.plan, options.rank
    assert plan.pipeline is not None
    graphs = split_plan_stages(capture.graph, plan, rank, op_strategies, micro_batches)
    builder = _StageBuilder(options, plan.pipeline, micro_batches)
    local_stages = plan.pipeline.stages_of(plan.mesh_coordinate(rank).get("pp", 0))
    return PipelineProgram(
        capture,
        micro_batches,
        graphs,
        {stage: builder.stage(graphs.stages[stage]) for stage in local_stages},
        builder.prologue_or_epilogue(graphs.prologue) if graphs.prologue is not None else None,
        builder.prologue_or_epilogue(graphs.epilogue),
    )
