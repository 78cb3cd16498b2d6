"""`partition`: the fastest operator strategies along an axis, at measured costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from autopar.core.ir.aliases import find_storages, is_view
from autopar.core.ir.batch_slicing import BATCH
from autopar.core.ir.graph import TrainingGraph, Value, elements
from autopar.core.ir.mesh_levels import DATA_AXIS
from autopar.core.ir.placement import OpStrategy, Partial, Placement, Shard, shard_dim
from autopar.core.ir.roles import Gradient, Parameter
from autopar.cost_model.group_shape import GroupShape
from autopar.passes.core.collective_ops import value_of, wait
from autopar.passes.rules.local_args import local_bytes, local_shape
from autopar.planner.machine import Machine
from autopar.planner.placement.constraints import resolve_constraints
from autopar.planner.placement.costs import PlacementCosts
from autopar.planner.placement.dispatch import Dispatch
from autopar.planner.placement.ilp import Price, Solution, Weight, Work, solve

AXIS = "tp"


def partition(
    graph: TrainingGraph,
    ranks: int,
    machine: Machine,
    *,
    mesh: Mapping[str, int] | None = None,
    axis: str = AXIS,
    pins: Mapping[str, Placement] | None = None,
    memory: int | None = None,
    copies: float = 4.0,
    shards: int = 1,
    wrapped: bool = True,
    keep_sharded: bool = False,
    sequence: bool = True,
    ring: bool | None = False,
    route: bool | None = None,
    dispatch: Dispatch | None = None,
) -> Solution:
    """The cheapest strategies of a graph along an axis.

    Args:
        graph: captured graph, on unsharded tensors.
        ranks: size of the axis.
        machine: times of collectives, operators and the optimizer's step.
        mesh: size of each axis, outermost first; by default data-parallel ranks around this axis.
        axis: name of this axis in the mesh.
        pins: required placements of parameters, by name pattern.
        memory: limit of a rank's parameters, gradients, optimizer state and saved activations, in
            bytes; if it is infeasible, bytes are minimised.
        copies: ratio of the bytes of a trained parameter with gradient and optimizer state to those
            of the parameter alone.
        shards: ranks over which ZeRO shards these copies on dim 0, at least a row on each.
        wrapped: whether parameters are DTensors even if all are replicated.
        keep_sharded: whether pinned parameters are never gathered.
        sequence: whether replicated activations may be sharded, and partial sums reduce-scattered.
        ring: whether attention goes by a ring of ranks where it can; None: where it is cheaper.
        route: whether rows go to the ranks of their experts where they can; None: where cheaper.
        dispatch: where tokens go once, if they do.

    Raises:
        StrategyError: A required placement is impossible.
        PlanError: No solution was found in time.
    """
    prices = costs_along(ranks, machine, mesh=mesh, axis=axis, dispatch=dispatch)
    trained, of_node, of_moved = _stored_bytes(graph, ranks, copies, shards)
    weight = None if memory is None else Weight(of_node, of_moved, memory)
    late, found = _only_returned(graph), resolve_constraints(pins or {}, graph.parameters, ranks)
    fixed = views_of(graph, found) if keep_sharded else frozenset[fx.Node]()

    def price(value: Value, before: Placement, after: Placement) -> float:
        cut = isinstance(after, Shard) and not isinstance(before, Shard)
        # Gradients may always be cut, since each must lie as its parameter does.
        if value.node in fixed or (cut and not sequence and value not in late):
            return math.inf
        how = prices.sum if value in late and isinstance(before, Partial) else prices.redistribution
        return how(value, before, after).seconds

    return solve(
        graph,
        ranks,
        price,
        lambda node, op_strategy: prices.operator(node, op_strategy).seconds,
        update=lambda node, op_strategy: (
            prices.step(node, op_strategy).seconds if node in trained else 0.0
        ),
        pins=found,
        weight=weight,
        wrapping=0.0 if wrapped else prices.wrapping(len(trained)),
        ring=ring,
        route=route,
    )


def views_of(graph: TrainingGraph, names: Iterable[str]) -> frozenset[fx.Node]:
    """Placeholders of parameters, and views of them."""
    wanted = set(names)
    found = {
        node
        for role, node in zip(graph.inputs, graph.placeholders, strict=True)
        if isinstance(role, Parameter) and role.name in wanted
    }
    for node in graph.calls():
        if is_view(node) and node.args[0] in found:
            found.add(node)
    return frozenset(found)


def costs_along(
    ranks: int,
    machine: Machine,
    *,
    mesh: Mapping[str, int] | None = None,
    axis: str = AXIS,
    dispatch: Dispatch | None = None,
) -> PlacementCosts:
    """Costs along an axis of a mesh, with the arguments of `partition`; it may have levels."""
    cluster = machine.cluster
    mesh = mesh or {DATA_AXIS: max(1, cluster.world_size // ranks), axis: ranks}
    shapes = {name: GroupShape.of_axis(mesh, name, cluster.ranks_per_node) for name in mesh}
    # Sums over rows still name the axis BATCH: `assign_batch_axis` runs after the partition.
    shapes[BATCH] = next(shape for name, shape in shapes.items() if name != "pp")
    sent = dispatch or Dispatch()
    return PlacementCosts(shapes[axis], cluster, machine.operators, machine.update, shapes, sent)


def _stored_bytes(
    graph: TrainingGraph, ranks: int, copies: float, shards: int
) -> tuple[set[fx.Node], Work, Price]:
    """Trained parameters, and bytes that stay in memory on a rank during a step.

    The bytes are those of a parameter with its `copies`, or of saved activations, under a strategy;
    and those of a redistributed value that the backward reads.
    """
    inputs = zip(graph.placeholders, graph.inputs, strict=True)
    names = {node: role.name for node, role in inputs if isinstance(role, Parameter)}
    trained = {node for node, name in names.items() if graph.parameters[name].requires_grad}
    saved, read = _saved(graph)

    def of_node(node: fx.Node, op_strategy: OpStrategy) -> float:
        places = (0,) if node in names else saved.get(node, ())
        if node in trained:
            return copies * _shard_bytes(elements(node)[0], op_strategy.results[0], ranks, shards)
        return sum(
            local_bytes(elements(node)[place], op_strategy.results[place], ranks)
            for place in places
        )

    def of_redistribution(value: Value, before: Placement, after: Placement) -> float:
        return local_bytes(value.tensor, after, ranks) if value.node in read else 0.0

    return trained, of_node, of_redistribution


def _shard_bytes(tensor: torch.Tensor, placement: Placement, ranks: int, shards: int) -> int:
    """The largest of a parameter's shards, on a rank of an axis."""
    shape = local_shape(tensor.shape, placement, ranks)
    if shape:
        shape = local_shape(shape, Shard(shard_dim(shape, shards)), shards)
    return math.prod(shape) * tensor.element_size()


def _only_returned(graph: TrainingGraph) -> frozenset[Value]:
    """Parameter gradients that no other operator reads."""
    return frozenset(
        value_of(node)
        for role, node in zip(graph.outputs, graph.results, strict=True)
        if isinstance(role, Gradient) and isinstance(role.of, Parameter) and node is not None
        if all(user.op == "output" for user in node.users)
    )


def _saved(
    graph: TrainingGraph,
) -> tuple[dict[fx.Node, frozenset[int]], frozenset[fx.Node]]:
    """Forward results saved for the backward, and all nodes that share their memory."""
    storages, behind = find_storages(graph.graph)
    read = {
        storage
        for node in graph.calls()
        if node.meta["phase"] == "backward"
        for source in node.all_input_nodes
        for storage in behind[source]
    }

    def tensor_places(node: fx.Node) -> list[int]:
        return [place for place, tensor in enumerate(elements(node)) if hasattr(tensor, "shape")]

    places: dict[fx.Node, list[int]] = {}
    for storage, made in enumerate(storages):
        maker = made.creator.args[0] if made.creator.target is wait else made.creator
        places.setdefault(maker, []).append(storage)  # type: ignore[arg-type]
    saved = {
        maker: frozenset(p for p, s in zip(tensor_places(maker), own, strict=False) if s in read)
        for maker, own in places.items()
        if maker.op == "call_function" and maker.meta["phase"] == "forward"
    }
    early = (n for n in graph.graph.nodes if n.meta.get("phase") != "backward")
    return saved, frozenset(n for n in early if not read.isdisjoint(behind.get(n, ())))
