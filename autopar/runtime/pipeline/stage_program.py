"""A captured call of a pipeline, lowered under a plan: the generated code of a rank's stages."""

from __future__ import annotations

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
from autopar.passes.split_forward_backward import split_forward_backward
from autopar.passes.stage_lowering import build_microbatch_pipelines, lower_stage, split_plan_stages
from autopar.plan.partition import NodeStrategies
from autopar.report.plan import Plan
from autopar.runtime.codegen.program import CompiledGraph, generate


@dataclass(frozen=True)
class StageBackward:
    """The backward of a stage, whole or in two.

    Attributes:
        graph: all of it.
        halves: one, or what other stages wait for and then what parameters need.
    """

    graph: TrainingGraph
    parts: tuple[CompiledGraph, ...]

    @property
    def saved(self) -> list[Saved]:
        """What it takes of the forward, in the order in which that returns it."""
        return [role for role in self.graph.inputs if isinstance(role, Saved)]


@dataclass(frozen=True)
class StageProgram:
    """What one stage runs for each micro-batch.

    Attributes:
        opening: its forward half on the first, where that gathers for the others too.
        forward: the same on all others, or on all.
        first: its backward on the first of several micro-batches; None if it has none.
        more: on those in between, which adds to the gradients of the ones before.
        last: on the last, which also reduces what was kept until then.
    """

    first_forward: CompiledGraph
    forward: CompiledGraph
    first_backward: StageBackward | None
    middle_backward: StageBackward | None
    last_backward: StageBackward | None


@dataclass(frozen=True)
class PipelineProgram:
    """What a call of a pipeline runs on one rank.

    Attributes:
        capture: the call of one micro-batch, with the structure of its result.
        micro_batches: how many there are.
        cut: the graphs of all stages.
        stages: the programs of the rank's own.
        prologue: yields parts of totals from the inputs; None if there are none.
        epilogue: makes of totals what is returned without rows, and new values of buffers.
    """

    capture: Capture
    micro_batches: int
    split: PipelineStages
    stages: Mapping[int, StageProgram]
    prologue: CompiledGraph | None
    epilogue: CompiledGraph

    @cached_property
    def differentiates(self) -> bool:
        """Whether there is a backward."""
        return any(isinstance(r, Gradient) for graph in self.split.stages for r in graph.outputs)

    @cached_property
    def is_random(self) -> bool:
        """Whether some rank draws random numbers."""
        return any(is_random(node) for graph in self.split.stages for node in graph.calls())

    def users_of(self, name: str) -> list[int]:
        """The stages that a parameter is used by."""
        graphs = enumerate(self.split.stages)
        return [stage for stage, graph in graphs if Parameter(name) in graph.inputs]


def build_pipeline_program(
    capture: Capture,
    plan: Plan,
    *,
    rank: int,
    op_strategies: Sequence[NodeStrategies] = (),
    micro_batches: int,
    comm_backend: str,
    groups: Mapping[str, str],
    compile_backend: str = "eager",
    hold: bool = False,
    held: tuple[str, ...] = (),
) -> PipelineProgram:
    """Lowers the capture of a micro-batch under a plan and generates the code of a rank's stages.

    The arguments are those of `program.build`.

    Args:
        capture: the call of one micro-batch.
        plan: what to do.
        rank: this rank in the world.
        op_strategies: of the graph before each axis that the model is partitioned along.
        micro_batches: into how many the rows of a rank are cut.
        comm_backend: what collectives are lowered for.
        groups: process group of each mesh axis.
        compile_backend: "eager" or a backend of torch.compile.
        hold: keep gradients local (`no_sync`).
        held: parameters with gradients held from earlier calls.
    """
    assert plan.pipeline is not None
    stages = split_plan_stages(capture.graph, plan, rank, op_strategies, micro_batches)
    compiled, in_two = compile_backend != "eager", plan.pipeline.schedule == "zero_bubble"

    def backward(graph: TrainingGraph | None, adds: bool) -> StageBackward | None:
        if graph is None:
            return None
        graph = accumulate_gradients(graph) if adds else graph
        parts = split_dgrad_wgrad(graph) if in_two else (graph,)
        return StageBackward(graph, tuple(map(half, parts)))

    def half(graph: TrainingGraph) -> CompiledGraph:
        return CompiledGraph(graph, generate(graph, groups, compile_backend))

    def program(graph: TrainingGraph) -> StageProgram:
        passes = build_microbatch_pipelines(
            graph,
            plan,
            rank,
            comm_backend,
            micro_batches=micro_batches,
            hold=hold,
            held=held,
            compiled=compiled,
        )
        turns = lower_stage(graph, passes, plan, micro_batches)
        final = split_forward_backward(turns.last)
        forward = half(final.forward)
        if micro_batches == 1:
            return StageProgram(forward, forward, None, None, backward(final.backward, adds=False))
        alike = turns.more is turns.last
        once = turns.first is not turns.more
        opening = half(split_forward_backward(turns.first).forward) if once else forward
        other = final if alike else split_forward_backward(turns.more)
        first, more = (backward(other.backward, adds=adds) for adds in (False, True))
        last = more if alike else backward(final.backward, adds=True)
        return StageProgram(opening, forward, first, more, last)

    def end(graph: TrainingGraph) -> CompiledGraph:
        place = plan.mesh_coordinate(rank)
        lower = [
            LowerCollectives(comm_backend, place[a], a) for a, n in plan.mesh if n > 1 and a != "pp"
        ]
        done = run_passes(graph, lower)
        return CompiledGraph(done, generate(done, groups, "eager"))

    own = plan.pipeline.stages_of(plan.mesh_coordinate(rank).get("pp", 0))
    return PipelineProgram(
        capture,
        micro_batches,
        stages,
        {stage: program(stages.stages[stage]) for stage in own},
        end(stages.prologue) if stages.prologue is not None else None,
        end(stages.epilogue),
    )
