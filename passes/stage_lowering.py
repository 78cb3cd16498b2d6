"""Lowering of a captured micro-batch to the programs of stages, for planner and runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from autopar.ir.batch_slicing import BATCH
from autopar.ir.graph import TrainingGraph
from autopar.ir.roles import Gradient, Parameter
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.pass_pipeline import PassPipeline
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.reuse_gathered import (
    export_gathered,
    import_gathered,
    once_gathered_params,
)
from autopar.passes.pipeline import build_model_pipeline, build_stage_pipeline
from autopar.passes.pipeline_parallel.split_stages import PipelineStages, split_stages
from autopar.plan.partition import NodeStrategies
from autopar.plan.spec import PlanSpec

T = TypeVar("T")


def place_plan_stages(
    graph: TrainingGraph,
    plan: PlanSpec,
    rank: int,
    op_strategies: Sequence[NodeStrategies],
    micro_batches: int,
) -> TrainingGraph:
    """The graph of a captured micro-batch, every operator of it with its stage."""
    graph = replace(graph, axes=plan.axes)
    if micro_batches > 1:
        graph = replace(graph, axes={**graph.axes, BATCH: plan.dp_size * micro_batches})
    passes = build_model_pipeline(
        plan, rank, op_strategies=op_strategies, micro_batches=micro_batches
    )
    return replace(run_passes(graph, passes), axes=plan.axes)  # micro-batches are no ranks


def split_plan_stages(
    graph: TrainingGraph,
    plan: PlanSpec,
    rank: int,
    op_strategies: Sequence[NodeStrategies],
    micro_batches: int,
) -> PipelineStages:
    """The graphs of all stages of a captured micro-batch, as a rank sees them.

    Args:
        graph: of one micro-batch.
        plan: with a pipeline.
        rank: this rank in the world.
        op_strategies: of the graph before each axis that the model is partitioned along.
        micro_batches: into how many the rows of a rank are cut.
    """
    assert plan.pipeline is not None
    return split_stages(
        place_plan_stages(graph, plan, rank, op_strategies, micro_batches), plan.pipeline.stages
    )


def build_microbatch_pipelines(
    graph: TrainingGraph,
    plan: PlanSpec,
    rank: int,
    backend: str,
    *,
    micro_batches: int,
    hold: bool = False,
    held: tuple[str, ...] = (),
    compiled: bool = False,
    disable: Sequence[str] = (),
) -> tuple[PassPipeline, PassPipeline]:
    """The pass pipelines of a stage, for the last micro-batch and for the ones before.

    The last one also reduces the gradients that were kept until then.

    Args:
        graph: of the stage.
        plan: with a pipeline.
        rank: this rank in the world.
        backend: the torch.distributed backend that collectives are lowered for.
        micro_batches: how many there are.
        hold: keep gradients local (`no_sync`).
        held: parameters with gradients held from earlier calls.
        compiled: whether a compiler follows.
        disable: names of passes to leave out.
    """
    gradients = (r.of for r in graph.outputs if isinstance(r, Gradient))
    trained = {of.name for of in gradients if isinstance(of, Parameter)}
    several = plan.dp_size > 1 and micro_batches > 1
    kept = (
        () if hold or not several else tuple(n for n in plan.unsharded_grad_params if n in trained)
    )
    own = tuple(n for n in dict.fromkeys((*held, *kept)) if n in graph.parameters)
    build = partial(
        build_stage_pipeline, plan, rank, backend, hold=hold, compiled=compiled, disable=disable
    )
    last = build(held=() if hold else own)
    return last, build(accumulate=True) if several else last


@dataclass(frozen=True)
class MicrobatchPrograms:
    """A stage lowered, as the micro-batches of a step run it.

    Attributes:
        first: of which the first runs the forward: what is gathered once a step, it gathers.
        more: of all but the last, and the forward of those behind the first.
        last: of the last: it also reduces the gradients that were kept until then.
    """

    first: TrainingGraph
    more: TrainingGraph
    last: TrainingGraph

    def of_each(self, run: Callable[[TrainingGraph], T]) -> tuple[T, T, T]:
        """The results of a function for first, more and last, computed once if equal."""
        last = run(self.last)
        more = last if self.more is self.last else run(self.more)
        return (more if self.first is self.more else run(self.first)), more, last

    def counted(self, micro_batches: int) -> Iterator[tuple[TrainingGraph, int]]:
        """The graphs of a number of micro-batches, each with its count; a single one is last."""
        yield self.last, 1
        if micro_batches > 1:
            yield self.more, micro_batches - 2
            yield self.first, 1


def lower_stage(
    graph: TrainingGraph, passes: tuple[Sequence[Pass], Sequence[Pass]], plan: PlanSpec, count: int
) -> MicrobatchPrograms:
    """A stage as its micro-batches run it.

    Args:
        graph: of the stage.
        passes: those of `build_microbatch_pipelines`.
        plan: with a pipeline.
        count: how many micro-batches there are.
    """
    at_last, before = passes
    last = run_passes(graph, at_last)
    more = last if before == at_last else run_passes(graph, before)
    zero = dict(plan.zero_stages)
    if count == 1 or not once_gathered_params(more, zero):
        return MicrobatchPrograms(more, more, last)
    later = import_gathered(more, zero)
    return MicrobatchPrograms(
        export_gathered(more, zero), later, later if last is more else import_gathered(last, zero)
    )
