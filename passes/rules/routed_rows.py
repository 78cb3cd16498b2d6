"""`regions_of`, `routed_strategies`: operators that run on the rows of a rank's own experts.

The rows that a router sends to a rank's experts may stay there from one product to the next.
Operators that compute row by row run on them as they are: each loop over rows has a twin whose
rows are `Routed`. So all rows of a region, those of one tensor of experts, lie in one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.core.ir.graph import TrainingGraph, elements, operands, tensors
from autopar.core.ir.mesh_levels import DATA_AXIS, axis_of_level
from autopar.core.ir.placement import OpStrategy, Placement, Routed, Shard
from autopar.core.operators.experts import expert_mm, expert_outer
from autopar.passes.core.collective_ops import is_name
from autopar.passes.rules.loops import Operator, overloads

AXIS = "ep"
"""The axis whose ranks send rows to each other's experts; others partition what it leaves."""

EXPERTS = frozenset((expert_mm, expert_outer))

ROW_WISE = frozenset(
    overloads(
        "split.Tensor split_with_sizes slice.Tensor cat sum.dim_IntList mean.dim "
        "unsqueeze clone _to_copy index.Tensor masked_fill.Scalar masked_fill.Tensor"
    )
)
"""Operators, besides pointwise ones, that no argument tells a number of rows."""


@dataclass(frozen=True)
class Region:
    """Operators around the products of one layer's rows with their experts.

    Attributes:
        experts: the experts of the rows.
        count: number of experts.
    """

    experts: fx.Node
    count: int


def may_route(graph: TrainingGraph) -> bool:
    """Whether a graph is to be partitioned along the axis of experts, and no other after it."""
    left = {axis_of_level(axis) for axis in graph.axes} - {DATA_AXIS, "pp"}
    return left - set(graph.partitioned) == {AXIS}


def regions_of(graph: TrainingGraph) -> dict[fx.Node, Region]:
    """The region of each operator that may run on routed rows."""
    products: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.calls():
        if node.target in EXPERTS:
            products.setdefault(_without_cast(node.args[2]), []).append(node)  # type: ignore[arg-type]
    place = {node: index for index, node in enumerate(graph.graph.nodes)} if products else {}
    regions = [
        (Region(experts, count), _around(experts, members, place))
        for experts, members in products.items()
        if (count := _experts_of(members))
    ]
    several = Counter(node for _, nodes in regions for node in nodes)
    found: dict[fx.Node, Region] = {}
    for region, nodes in regions:
        # Rows of two layers lie in two orders, so layers without an operator between have neither.
        if all(several[node] == 1 for node in nodes):
            found |= dict.fromkeys(nodes, region)
    return found


def _experts_of(members: Iterable[fx.Node]) -> int:
    """The number of experts of some products; 0 if they have only some of them, or differ."""
    counts = set[int]()
    for node in members:
        operator = Operator.of(node)
        is_product = node.target is expert_mm
        is_whole = not operator.argument("first") and not operator.argument("total")
        count = operator.operands[1].shape[0] if is_product else operator.argument("count")
        counts.add(count if is_whole else 0)
    return counts.pop() if len(counts) == 1 else 0


def _around(
    experts: fx.Node, members: Iterable[fx.Node], place: Mapping[fx.Node, int]
) -> list[fx.Node]:
    """The operators behind the experts that are connected with their products by rows."""
    rows, seen, pending = tensors(experts)[0].shape[0], set[fx.Node](), list(members)
    while pending:
        node = pending.pop()
        is_behind = node not in seen and place[node] > place[experts]
        if is_behind and (is_name(node) or _takes_rows(node, rows)):
            seen.add(node)
            users = (user for user in node.users if user.op != "output")
            pending += [*node.all_input_nodes, *users]
    return [node for node in seen if not is_name(node)]


def _takes_rows(node: fx.Node, rows: int) -> bool:
    """Whether an operator may compute on any number of rows."""
    if node.op != "call_function":
        return False
    row_wise = node.target in ROW_WISE or torch.Tag.pointwise in getattr(node.target, "tags", ())
    if not (row_wise or node.target in EXPERTS):
        return False
    made = [*elements(node), *(t for n in operands(node) for t in elements(n))]
    return any(t is not None and t.shape[:1] == (rows,) for t in made)


def _without_cast(node: fx.Node) -> fx.Node:
    while node.target is torch.ops.aten._to_copy.default:
        node = node.all_input_nodes[0]
    return node


def routed_strategies(
    operator: Operator, strategies: Iterable[OpStrategy], rows: int
) -> Iterator[OpStrategy]:
    """The twins of an operator's strategies over `rows` rows that run on routed rows.

    The experts of routed rows are on their rank, so products of experts leave no partial sum.
    """
    values = (*operator.operands, *operator.results)
    pieces = dict[int, None]()
    for strategy in strategies:
        places = zip((*strategy.operands, *strategy.results), values, strict=True)
        shards = [(p, t) for p, t in places if isinstance(p, Shard) and t is not None]
        of_rows = all(p.dim == 0 and t.shape[0] == rows for p, t in shards)
        interleaves = {p.interleave for p, _ in shards}
        if strategy.lowering or not of_rows or len(interleaves) != 1:
            continue
        pieces |= dict.fromkeys(interleaves)
        if operator.target not in EXPERTS:
            yield _routed(strategy)
    for count in pieces if operator.target in EXPERTS else ():
        there: Placement = Routed(0, count)
        if operator.target is expert_mm:
            yield OpStrategy((there, Shard(0), there), (there,), "experts")
        else:
            yield OpStrategy((there, there, there), (Shard(0),), "experts_outer")


def _routed(strategy: OpStrategy) -> OpStrategy:
    def twin(placement: Placement) -> Placement:
        return Routed(0, placement.interleave) if isinstance(placement, Shard) else placement

    operands, results = map(twin, strategy.operands), map(twin, strategy.results)
    return replace(strategy, operands=tuple(operands), results=tuple(results))


def is_routed(strategy: OpStrategy) -> bool:
    """Whether an operator runs on routed rows."""
    return any(isinstance(p, Routed) for p in (*strategy.operands, *strategy.results))
