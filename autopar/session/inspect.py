"""`program_text`: the program of one rank under a plan, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autopar.capture.batch_slices import capture_of_rank
from autopar.capture.model_info import describe_parameters
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.mesh_levels import DATA_AXIS
from autopar.core.plan.decisions import check_plan
from autopar.core.plan.layout import Layout
from autopar.core.plan.partition import NodeStrategies, rescale_interleave, rows_of
from autopar.core.plan.plan import Plan
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline import build_pass_pipeline, build_stage_pipeline
from autopar.passes.stage_lowering import GATHER_ONCE_STAGES, split_plan_stages
from autopar.passes.tensor_parallel.partition_in_order import partition_in_order
from autopar.planner.placement.unmeasured import repartition
from autopar.runtime.codegen.program import with_axes


def program_text(
    model: nn.Module,
    example_inputs: Any,
    *,
    plan: Plan,
    rank: int = 0,
    disable: Sequence[str] = (),
) -> str:
    """The program of one rank under a plan, lowered for the plan's backend: one line per operator.

    Raises:
        PlanError: the plan is for another model.
    """
    check_plan(plan, model, describe_parameters(model).values(), plan.world_size)
    backend = plan.comm_backend
    coordinate = Layout(plan).coordinate(rank)
    graph = _capture_under(plan, model, example_inputs, coordinate[DATA_AXIS])
    planned = {
        axis: (before, op_strategies)
        for axis, before, op_strategies in planned_strategies(model, example_inputs, plan)
    }

    def rescaled(axis: str, graph: TrainingGraph) -> NodeStrategies:
        first, op_strategies = planned[axis]
        return rescale_interleave(op_strategies, first, rows_of(first), rows_of(graph))

    whole = with_axes(graph, plan)
    strategies = [found for _, _, found in partition_in_order(planned, whole, coordinate, rescaled)]
    if plan.pipeline is None:
        passes = build_pass_pipeline(plan, rank, backend, op_strategies=strategies, disable=disable)
        return str(run_passes(whole, passes))
    stages = split_plan_stages(graph, plan, rank, strategies, plan.pipeline.micro_batches).stages
    passes = build_stage_pipeline(plan, rank, backend, disable=disable)
    gathers_once = {*GATHER_ONCE_STAGES} & {*dict(plan.zero_stages).values()}
    once = "; what ZeRO 1 and 2 gather, the first for all" if gathers_once else ""
    return "\n\n".join(
        f"# stage {stage} of {plan.pipeline.stages}, for each micro-batch{once}\n"
        f"{run_passes(stages[stage], passes)}"
        for stage in plan.pipeline.stages_of(coordinate.get("pp", 0))
    )


def planned_strategies(
    model: nn.Module, example_inputs: Any, plan: Plan
) -> Iterator[tuple[str, TrainingGraph, NodeStrategies]]:
    """Yields each partitioned axis, the first rank's graph before it, and its strategies."""
    partitions = {partition.axis: partition for partition in plan.partitions}

    def find(axis: str, graph: TrainingGraph) -> NodeStrategies:
        op_strategies = partitions[axis].strategies_for(graph, rows_of(graph))
        return repartition(graph, partitions[axis]) if op_strategies is None else op_strategies

    graph = with_axes(_capture_under(plan, model, example_inputs, 0), plan)
    return partition_in_order(partitions, graph, Layout(plan).coordinate(0), find)


def _capture_under(
    plan: Plan, model: nn.Module, example_inputs: Any, data_rank: int
) -> TrainingGraph:
    return capture_of_rank(
        model,
        example_inputs,
        data_rank,
        plan.dp_size,
        plan.batch,
        autocast=getattr(torch, plan.precision) if plan.precision else None,
        micro_batches=plan.pipeline.micro_batches if plan.pipeline is not None else 1,
        local=plan.batch_semantics == "local",
        comm_backend=plan.comm_backend,
        gathers_rows=plan.batch == "global",
    )
