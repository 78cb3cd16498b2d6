"""`lower_stage`: the programs of a pipeline stage, for planner and runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from torch import fx

from autopar.core.ir.batch_slicing import BATCH
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import Gradient, Parameter, UnshardedParam
from autopar.core.plan.decisions import Decisions
from autopar.core.plan.layout import Layout
from autopar.core.plan.partition import NodeStrategies
from autopar.passes.core.node_builder import add_input
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.pass_pipeline import PassPipeline
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline import build_model_pipeline, build_stage_pipeline
from autopar.passes.pipeline_parallel.split_stages import PipelineStages, split_stages

T = TypeVar("T")

GATHER_ONCE_STAGES = (1, 2)
"""ZeRO stages that gather parameters once a step, in its first micro-batch."""


def place_plan_stages(
    graph: TrainingGraph,
    decisions: Decisions,
    rank: int,
    op_strategies: Sequence[NodeStrategies],
    micro_batches: int,
) -> TrainingGraph:
    """The graph of a captured micro-batch, partitioned, with the stage of every operator.

    Args:
        graph: captured graph of one micro-batch.
        decisions: what a plan with a pipeline decides.
        rank: this rank in the world.
        op_strategies: strategies of the nodes along each axis of `decisions.partitions`, in that
            order.
        micro_batches: number of micro-batches of each rank.
    """
    batch = {BATCH: decisions.dp_size * micro_batches} if micro_batches > 1 else {}
    axes = Layout(decisions).axes
    graph = replace(graph, axes={**axes, **batch})
    passes = build_model_pipeline(
        decisions, rank, op_strategies=op_strategies, micro_batches=micro_batches
    )
    return replace(run_passes(graph, passes), axes=axes)  # drop `BATCH`, which is no mesh axis


def split_plan_stages(
    graph: TrainingGraph,
    decisions: Decisions,
    rank: int,
    op_strategies: Sequence[NodeStrategies],
    micro_batches: int,
) -> PipelineStages:
    """The graphs of all stages of a captured micro-batch, partitioned for one rank."""
    assert decisions.pipeline is not None
    placed = place_plan_stages(graph, decisions, rank, op_strategies, micro_batches)
    return split_stages(placed, decisions.pipeline.stages)


def build_microbatch_pipelines(
    graph: TrainingGraph,
    decisions: Decisions,
    rank: int,
    backend: str,
    *,
    micro_batches: int,
    hold: bool = False,
    held: tuple[str, ...] = (),
    compiled: bool = False,
    disable: Sequence[str] = (),
) -> tuple[PassPipeline, PassPipeline]:
    """The pass pipelines of a stage, for the last micro-batch and for the earlier ones.

    Only the last micro-batch reduces the gradients that earlier ones keep unreduced. Arguments are
    as in `build_pass_pipeline`, for the graph of a stage.
    """
    several = decisions.dp_size > 1 and micro_batches > 1
    own: tuple[str, ...] = ()
    if not hold:
        gradients = (r.of for r in graph.outputs if isinstance(r, Gradient))
        trained = {of.name for of in gradients if isinstance(of, Parameter)}
        kept = (n for n in Layout(decisions).unsharded_grad_params if several and n in trained)
        own = tuple(n for n in dict.fromkeys((*held, *kept)) if n in graph.parameters)
    build = partial(
        build_stage_pipeline,
        decisions,
        rank,
        backend,
        hold=hold,
        compiled=compiled,
        disable=disable,
    )
    last = build(held=own)
    return last, build(accumulate=True) if several else last


@dataclass(frozen=True)
class MicrobatchPrograms:
    """Lowered graphs of a stage, for the micro-batches of a step.

    Attributes:
        first: graph of the first forward, which gathers the parameters gathered once a step.
        more: graph of later forwards, and of all backwards but the last.
        last: graph of the last micro-batch, which reduces unreduced gradients.
    """

    first: TrainingGraph
    more: TrainingGraph
    last: TrainingGraph

    def of_each(self, run: Callable[[TrainingGraph], T]) -> tuple[T, T, T]:
        """The results of a function on `first`, `more` and `last`; equal graphs run once."""
        last = run(self.last)
        more = last if self.more is self.last else run(self.more)
        return (more if self.first is self.more else run(self.first)), more, last

    def counted(self, micro_batches: int) -> Iterator[tuple[TrainingGraph, int]]:
        """Each graph with its number of micro-batches; a single micro-batch runs `last`."""
        yield self.last, 1
        if micro_batches > 1:
            yield self.more, micro_batches - 2
            yield self.first, 1


def lower_stage(
    graph: TrainingGraph,
    passes: tuple[Sequence[Pass], Sequence[Pass]],
    decisions: Decisions,
    count: int,
) -> MicrobatchPrograms:
    """Lowers a stage for `count` micro-batches by the result of `build_microbatch_pipelines`."""
    at_last, before = passes
    last = run_passes(graph, at_last)
    more = last if before == at_last else run_passes(graph, before)
    zero = dict(decisions.zero_stages)
    # Gathered by each micro-batch, a parameter would be in memory once for each one in flight.
    if count == 1 or not once_gathered_params(more, zero):
        return MicrobatchPrograms(more, more, last)
    later = import_gathered(more, zero)
    return MicrobatchPrograms(
        export_gathered(more, zero), later, later if last is more else import_gathered(last, zero)
    )


def once_gathered_params(
    graph: TrainingGraph, zero_stages: Mapping[str, int]
) -> dict[str, fx.Node]:
    """The gathered value of each parameter that a step gathers once, by name.

    ZeRO stages 1 and 2 shard parameters between steps, and unshard them within a step.
    """
    return {
        name: node
        for node in graph.calls()
        if (name := node.meta.get("gathered")) and node.meta["phase"] == "forward"
        if zero_stages[graph.parameters[name].block] in GATHER_ONCE_STAGES
    }


def export_gathered(graph: TrainingGraph, zero_stages: Mapping[str, int]) -> TrainingGraph:
    """The program of the first micro-batch, which also returns the gathered parameters."""
    graph = graph.copy()
    found = once_gathered_params(graph, zero_stages)
    return graph.with_results({UnshardedParam(name): node for name, node in found.items()})


def import_gathered(graph: TrainingGraph, zero_stages: Mapping[str, int]) -> TrainingGraph:
    """The program of a later micro-batch, which takes the gathered parameters as inputs.

    Values keep their names, so that all micro-batches share a backward.
    """
    graph = graph.copy()
    for name, node in once_gathered_params(graph, zero_stages).items():
        graph, unsharded = add_input(
            graph, UnshardedParam(name), f"{node.name}_given", node.meta["val"]
        )
        unsharded.meta = {**node.meta, "phase": "forward"}
        node.replace_all_uses_with(unsharded)
        todo = [node]
        while todo:  # erase the gather
            unused = todo.pop()
            if unused.op == "call_function" and not unused.users:
                todo += [n for n in unused.all_input_nodes if n not in todo]
                graph.graph.erase_node(unused)
        unsharded.name = node.name
    return graph
