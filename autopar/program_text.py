"""`program_text`: the program of one rank under a plan, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autopar.captures import capture_of_rank
from autopar.graph import TrainingGraph
from autopar.partition import Ways, in_turn, rows_of, scaled
from autopar.passes.keep_gathered import ONCE
from autopar.passes.runner import run_passes
from autopar.plan import Plan
from autopar.planner.partitions import repartition
from autopar.runtime.parameters import describe_parameters, device_of
from autopar.runtime.program import with_axes
from autopar.staging import cut


def program_text(model: nn.Module, example_inputs: Any, *, plan: Plan, rank: int = 0) -> str:
    """The program of one rank under a plan: provenance, then a line for every operator."""
    parameters = describe_parameters(model)
    plan.check(model, parameters.values(), plan.world_size)
    backend = "gloo" if device_of(model).type == "cpu" else "nccl"
    place = plan.place(rank)
    graph = _capture_under(plan, model, example_inputs, place[plan.axis])
    planned = {axis: (g, ways) for axis, g, ways in planned_ways(model, example_inputs, plan)}

    def as_planned(axis: str, graph: TrainingGraph) -> Ways:
        first, ways = planned[axis]
        return scaled(ways, first, rows_of(first), rows_of(graph))

    turns = in_turn(planned, with_axes(graph, plan), place, as_planned)
    own = [ways for _, _, ways in turns]
    if plan.pipeline is None:
        return str(run_passes(with_axes(graph, plan), plan.passes(rank, backend, ways=own)))
    stages = cut(graph, plan, rank, own, plan.pipeline.micro_batches).stages
    passes, zero = plan.stage_passes(rank, backend), dict(plan.stages)
    once = "; what ZeRO 1 and 2 gather, the first for all" if {*ONCE} & {*zero.values()} else ""
    return "\n\n".join(
        f"# stage {stage} of {plan.pipeline.stages}, for each micro-batch{once}\n"
        f"{run_passes(stages[stage], passes)}"
        for stage in plan.pipeline.stages_of(place.get("pp", 0))
    )


def planned_ways(
    model: nn.Module, example_inputs: Any, plan: Plan
) -> Iterator[tuple[str, TrainingGraph, Ways]]:
    """Each axis that a plan partitions a model along, the first rank's graph before, its ways."""
    partitions = {partition.axis: partition for partition in plan.partitions}

    def find(axis: str, graph: TrainingGraph) -> Ways:
        ways = partitions[axis].ways_of(graph, rows_of(graph))
        return repartition(graph, partitions[axis]) if ways is None else ways

    graph = with_axes(_capture_under(plan, model, example_inputs, 0), plan)
    return in_turn(partitions, graph, plan.place(0), find)


def _capture_under(
    plan: Plan, model: nn.Module, example_inputs: Any, data_rank: int
) -> TrainingGraph:
    autocast = getattr(torch, plan.precision) if plan.precision else None
    ranks, batch = plan.data_ranks, plan.batch
    count = plan.pipeline.micro_batches if plan.pipeline is not None else 1
    own = model, example_inputs, data_rank, ranks, batch, autocast, None, count
    return capture_of_rank(*own, local=plan.batch_semantics == "local")
