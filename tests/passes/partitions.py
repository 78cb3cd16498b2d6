"""The graph of a model, partitioned for all ranks of an axis and run in lockstep."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.capture.call import batch_shard_of
from autopar.capture.model_info import describe_parameters
from autopar.capture.trace import capture
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.placement import Placement, Replicate
from autopar.core.ir.roles import Buffer, Input, InputRole, Output, OutputRole, Parameter
from autopar.core.plan.partition import NodeStrategies
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.runner import run_passes
from autopar.passes.rules.proof.oracle import shard_tensor, unshard
from autopar.passes.rules.proof.spmd_interpreter import run_spmd
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis

AXIS = "tp"
WHOLE = Replicate()
Values = dict[InputRole, Tensor]


def captured(
    model: nn.Module, batch: tuple[Any, dict[str, Any]], ranks: int
) -> tuple[TrainingGraph, Values]:
    """The graph of a call of a model, over `ranks`, and what it is given."""
    leaves, structure = pytree.tree_flatten(batch)
    call = batch_shard_of(leaves, structure, mode="global", rank=0, ranks=1).call
    graph = capture(model, call, describe_parameters(model), device=torch.device("cpu")).graph
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values: Values = {}
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        match role:
            case Parameter(name) | Buffer(name):
                values[role] = state[name].detach()
            case Input(index):
                values[role] = leaves[index]
            case _:
                values[role] = torch.ones(node.meta["val"].shape, dtype=torch.float64)
    return replace(graph, axes={AXIS: ranks}), values


def partitioned(
    graph: TrainingGraph, ranks: int, op_strategies: NodeStrategies, values: Values, *more: Pass
) -> dict[OutputRole, Tensor | None]:
    """What all ranks return together after these and `more` passes; None where they disagree."""
    graphs = [
        run_passes(graph, [PartitionAxis(AXIS, r, op_strategies), *more]) for r in range(ranks)
    ]
    lies = {n.name: r for n, r in zip(graph.placeholders, graph.inputs, strict=True)}
    placed = {
        lies[name]: op_strategy.results[0] for name, op_strategy in op_strategies if name in lies
    }
    parts = [shard_tensor(values[role], placed.get(role, WHOLE), ranks) for role in graph.inputs]
    found = run_spmd([module_of(g) for g in graphs], list(zip(*parts, strict=True)))
    kept = kept_shards(graphs[0], AXIS)
    return {
        role: unshard(results, kept.get(role) or placed.get(getattr(role, "of", None), WHOLE))  # type: ignore[call-overload]
        for role, results in zip(graph.outputs, zip(*found, strict=True), strict=True)
        if results[0] is not None
    }


def kept_shards(graph: TrainingGraph, axis: str) -> dict[OutputRole, Placement]:
    """The shards of outputs that a program returns in parts along an axis."""
    return {
        Output(index): each.shard
        for index, shards in graph.output_shards.items()
        for each in shards
        if each.axis == axis
    }


def whole(graph: TrainingGraph, values: Values) -> dict[OutputRole, Tensor]:
    """What one device returns."""
    (found,) = run_spmd([module_of(graph)], [[values[role] for role in graph.inputs]])
    return dict(zip(graph.outputs, found, strict=True))


def module_of(graph: TrainingGraph) -> fx.GraphModule:
    """The graph with its constants."""
    return fx.GraphModule(dict(graph.constants), graph.graph)
