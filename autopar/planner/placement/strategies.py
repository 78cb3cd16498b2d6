"""`strategy_choices`: possible strategies of each operator along an axis."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.core.common.deadline import check_time
from autopar.core.ir.graph import TrainingGraph, Value, elements, operands, tensors
from autopar.core.ir.mesh_levels import DATA_AXIS, axis_of_level
from autopar.core.ir.placement import OpStrategy, Placement, Replicate, Shard, can_cut
from autopar.core.ir.roles import Parameter
from autopar.errors import StrategyError
from autopar.passes.core.collective_ops import is_name, value_of
from autopar.passes.rules.loops import (
    DimAccess,
    Loop,
    Operator,
    feasible_loops,
    replicated,
    split_loop,
)
from autopar.passes.rules.lowerings.ring_attention import RING
from autopar.passes.rules.operators.partial_linear import linear_strategies
from autopar.passes.rules.registry import loops_of
from autopar.passes.rules.routed_rows import EXPERTS, may_route, regions_of, routed_strategies
from autopar.planner.placement.repeated_nodes import repeated


@dataclass(frozen=True)
class StrategyChoices:
    """Possible strategies of the nodes of a graph along an axis.

    Attributes:
        same: representative of each node; nodes with the same one share a strategy.
        op_strategies: strategies of each representative operator and placeholder.
        reads: values that each operator reads, in the order of its operands.
    """

    same: Mapping[fx.Node, fx.Node]
    op_strategies: Mapping[fx.Node, Sequence[OpStrategy]]
    reads: Mapping[fx.Node, Sequence[Value]]

    def alike(self, value: Value) -> Value:
        return Value(self.same[value.node], value.index)


def strategy_choices(
    graph: TrainingGraph,
    ranks: int,
    pins: Mapping[str, Placement] | None = None,
    *,
    ring: bool | None = False,
    route: bool | None = None,
) -> StrategyChoices:
    """Strategies of a graph: every loop of every operator, with the interleaves that views need.

    Attention may go by a ring of ranks unless `ring` is false; it has to, where it can, if true.
    So may rows go to the ranks of their experts, by `route`.

    Raises:
        StrategyError: A pinned shard is uneven, but this is not the last axis to partition.
    """
    pins, even = pins or {}, not _is_last(graph)
    same = dict(repeated(graph, pins))
    calls = [node for node in graph.calls() if not is_name(node)]
    reads = {node: [value_of(source) for source in operands(node)] for node in calls}
    loops = {
        node: _loops(node, even, () if ring is False else (RING,)) if _known(reads[node]) else []
        for node in calls
        if same[node] is node
    }
    pinned: list[tuple[Value, int, int]] = []
    inputs = dict(zip(graph.placeholders, graph.inputs, strict=True))
    for node, role in inputs.items():
        if isinstance(role, Parameter) and isinstance(pin := pins.get(role.name), Shard):
            if even and tensors(node)[0].shape[pin.dim] % ranks:
                raise StrategyError(
                    f"placements={{{role.name!r}: {pin}}} is uneven over {ranks} ranks, and the "
                    "model is partitioned along another axis behind. Choose another dim, or let "
                    "this axis be the last."
                )
            pinned.append((Value(node), pin.dim, pin.interleave))
    routes = _routes(graph, same) if route is not False else {}
    whole: Placement = Replicate()
    op_strategies: dict[fx.Node, Sequence[OpStrategy]] = {}
    for node, own in _interleaved(loops, reads, same, ranks, pinned).items():
        check_time()
        if _known(reads[node]):
            operator = Operator.of(node)
            ways = [replicated(operator), *map(split_loop, own), *linear_strategies(operator)]
            rings = [way for way in ways if ring and way.lowering == RING]
            if node in routes:
                routed = list(routed_strategies(operator, ways, routes[node]))
                ways = routed if route and routed and node.target in EXPERTS else ways + routed
            op_strategies[node] = list(dict.fromkeys(rings or ways))
        else:
            results = (whole,) * len(elements(node))
            op_strategies[node] = [OpStrategy((whole,) * len(reads[node]), results)]
    found = StrategyChoices(same, op_strategies, reads)
    wanted = _wanted(found)
    for node, role in inputs.items():
        if same[node] is not node:
            continue
        lies = [whole]
        if isinstance(role, Parameter):
            lies += _shards(node, ranks, even) + wanted.get(node, [])
            lies = [pins[role.name]] if role.name in pins else lies
        op_strategies[node] = [OpStrategy((), (p,)) for p in dict.fromkeys(lies)]
    for node in graph.graph.find_nodes(op="get_attr"):
        op_strategies[node] = [OpStrategy((), (whole,))]
    return found


def _routes(graph: TrainingGraph, same: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, int]:
    """Rows of each representative of operators that may run on routed rows, in every block."""
    regions = regions_of(graph) if may_route(graph) else {}
    apart = {same[node] for node in graph.calls() if node in same and node not in regions}
    return {
        same[node]: int(tensors(region.experts)[0].shape[0])
        for node, region in regions.items()
        if same[node] not in apart
    }


def _is_last(graph: TrainingGraph) -> bool:
    """Whether this is the last axis to partition.

    Ranks take the first rank's strategies along later axes, so shards along this one must be even.
    """
    axes = {axis_of_level(axis) for axis in graph.axes} - {DATA_AXIS}
    left = axes - set(graph.partitioned)
    return len(left) < 2


def _loops(node: fx.Node, even: bool, also: Container[str]) -> list[Loop]:
    """Loops of an operator; those over batch dims, or all if `even`, allow even shards only.

    Batch dims need even shards because other data-parallel ranks, which may have fewer rows, use
    the same strategies.
    """
    over = [(n.meta.get("batch_dims") or ((),))[0] for n in operands(node)]
    made = node.meta.get("batch_dims") or ((),) * len(elements(node))

    def of_rows(loop: Loop) -> bool:
        places = zip((*loop.operands, *loop.results), (*over, *made), strict=False)
        return any(isinstance(at, DimAccess) and at.dim in dims for at, dims in places)

    loops = loops_of(Operator.of(node), also)
    return [replace(loop, even_only=True) if even or of_rows(loop) else loop for loop in loops]


def _known(reads: Sequence[Value]) -> bool:
    """Whether every operand is a tensor, which rules require."""
    return all(isinstance(value.tensor, torch.Tensor) for value in reads)


def _shards(node: fx.Node, ranks: int, even: bool) -> list[Placement]:
    """Shard placements in which a parameter may be stored, and gathered before use."""
    return [
        Shard(dim)
        for dim, size in enumerate(tensors(node)[0].shape)
        if size % ranks == 0 or (not even and can_cut(size, ranks))
    ]


def _wanted(found: StrategyChoices) -> dict[fx.Node, list[Placement]]:
    """Shard placements that readers of each placeholder may require."""
    wanted: dict[fx.Node, list[Placement]] = {}
    for node, reads in found.reads.items():
        for place, value in enumerate(reads):
            if value.node.op == "placeholder":
                op_strategies = found.op_strategies[found.same[node]]
                lies = (w.operands[place] for w in op_strategies)
                shards = [p for p in lies if isinstance(p, Shard)]
                wanted.setdefault(found.same[value.node], []).extend(shards)
    return wanted


def _interleaved(
    loops: Mapping[fx.Node, Sequence[Loop]],
    reads: Mapping[fx.Node, Sequence[Value]],
    same: Mapping[fx.Node, fx.Node],
    ranks: int,
    pinned: Iterable[tuple[Value, int, int]],
) -> dict[fx.Node, list[Loop]]:
    """Loops of each node, with every interleave to try.

    Interleaved shards originate at views, and are useful as long as neighbouring operators
    propagate them. Interleaves of a value's dim therefore spread to all loops over that dim, in
    both directions, until a fixed point.
    """
    pieces = {(node, i): {1} for node, own in loops.items() for i in range(len(own))}
    places: dict[tuple[fx.Node, int], set[tuple[Value, int, int]]] = {key: set() for key in pieces}
    for node, values in reads.items():
        stands = same[node]
        alike = [Value(same[v.node], v.index) for v in values]
        for i, loop in enumerate(loops[stands]):
            found = _places(stands, alike, loop)
            places[stands, i] |= {(value, at.dim, at.interleave) for value, at in found}
    over: dict[tuple[Value, int], list[tuple[fx.Node, int, int]]] = {}
    for (node, i), runs_over in places.items():
        for value, dim, interleave in runs_over:
            over.setdefault((value, dim), []).append((node, i, interleave))
    new, met = list(pinned), set[tuple[Value, int, int]]()

    def tell(node: fx.Node, i: int, count: int) -> None:
        """Records the interleave that a loop implies for the values it runs over."""
        if any(feasible_loops(loops[node][i], ranks, (count,))):
            new.extend((value, dim, own * count) for value, dim, own in places[node, i])

    for node, i in pieces:
        tell(node, i, 1)
    while new:
        value, dim, total = item = new.pop()
        if item in met:
            continue
        met.add(item)
        for node, i, interleave in over.get((value, dim), ()):
            count, rest = divmod(total, interleave)
            if not rest and loops[node][i].interleavable and count not in pieces[node, i]:
                pieces[node, i].add(count)
                tell(node, i, count)
    return {
        node: [
            made
            for i, loop in enumerate(own)
            for made in feasible_loops(loop, ranks, sorted(pieces[node, i]))
        ]
        for node, own in loops.items()
    }


def _places(node: fx.Node, reads: Sequence[Value], loop: Loop) -> Iterator[tuple[Value, DimAccess]]:
    """Operands and results that a loop of a node runs over, and their dims."""
    results: list[Any] = [Value(node, place) for place in range(len(loop.results))]
    for value, at in [
        *zip(reads, loop.operands, strict=True),
        *zip(results, loop.results, strict=True),
    ]:
        if isinstance(at, DimAccess):
            yield value, at
