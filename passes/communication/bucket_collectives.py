"""`BucketCollectives`: collectives of one kind merged into fewer and larger messages.

Each collective has a latency whatever its size, and a model has a gradient for every parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from autopar.core.ir.graph import GraphProperty, TrainingGraph, tensor_bytes, tensors
from autopar.core.plan.buckets import Buckets, Group
from autopar.passes.core.collective_ops import (
    annotate,
    axis_of,
    collective,
    op_of,
    results_of,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    starts,
    tagged,
    wait_of,
)
from autopar.passes.core.pass_base import Pass, PassResult


@dataclass(frozen=True)
class BucketCollectives(Pass):
    """Merges gathers and reductions by the plan's buckets, and all-reduces of statistics.

    Before: one collective for each tensor. After: one collective for each bucket and kind. Names
    that the graph lacks are ignored, so that every graph of a model has the same buckets. A bucket
    of gathers starts with its first member, a bucket of reductions with its last. Tier: exact.

    Attributes:
        sizes: bytes of gather and reduction buckets, to propose buckets of the graph itself.
    """

    buckets: Buckets
    sizes: tuple[int, ...] = ()
    ensures = frozenset({GraphProperty.COLLECTIVES_BUCKETED})

    def __call__(self, graph: TrainingGraph) -> PassResult:
        graph = graph.copy()
        buckets = propose_buckets(graph, *self.sizes) if self.sizes else self.buckets
        merged = 0
        for groups, select in (
            (buckets.gather, gathers(graph, "forward")),
            (buckets.regather, gathers(graph, "backward")),
            (buckets.reduce, reductions(graph)),
        ):
            by_name: dict[str, list[fx.Node]] = {}
            for name, start in select:
                by_name.setdefault(name, []).append(start)
            for group in groups:
                kinds: dict[object, list[fx.Node]] = {}
                for start in dict.fromkeys(s for name in group for s in by_name.get(name, ())):
                    kind = (start.target, tensors(start)[0].dtype, axis_of(start))
                    kinds.setdefault(kind, []).append(start)
                for alike in kinds.values():
                    merged += len(alike) > 1 and bool(merge_collectives(graph.graph, alike))
        merged += merge_statistics(graph)
        reason = "" if merged else "no two collectives can travel together"
        return PassResult(graph, reason)


def propose_buckets(graph: TrainingGraph, gather_bytes: int, reduce_bytes: int) -> Buckets:
    """Buckets of consecutive collectives of one kind, up to sizes in bytes of unsharded tensors."""
    return Buckets(
        tuple(_fill(gathers(graph, "forward"), gather_bytes)),
        tuple(_fill(gathers(graph, "backward"), gather_bytes)),
        tuple(_fill(reductions(graph), reduce_bytes)),
    )


def gathers(graph: TrainingGraph, phase: str) -> list[tuple[str, fx.Node]]:
    """The parameter name and the start of every gather of a phase."""
    own = (s for s in starts(graph) if s.target is start_all_gather and s.meta["phase"] == phase)
    return [(name, start) for start in own for name in tagged(start, "gathered")]


def reductions(graph: TrainingGraph) -> list[tuple[str, fx.Node]]:
    """The parameter name and the start of every reduction of a gradient."""
    return [(name, start) for start in starts(graph) for name in tagged(start, "gradient")]


def merge_collectives(graph: fx.Graph, members: list[fx.Node]) -> fx.Node:
    """Merges collectives of one kind and returns the start of the new one."""
    members = sorted(members)
    first = members[0]
    place = first if first.target is start_all_gather else members[-1]
    operands: list[fx.Node] = [x for m in members for x in m.args[0]]  # type: ignore[union-attr,misc]
    options = list(first.args[1:])
    if first.target in (start_all_gather, start_reduce_scatter):
        options[0] = [n for m in members for n in m.args[1]]  # type: ignore[union-attr]
    old = [result for m in members for result in results_of(m)]
    if place is first:
        # The shard of a later member may be cast behind the place of the first.
        for node in _behind(place, operands):
            place.prepend(node)
    graph.inserting_before(place.next)
    new = collective(graph, place, first.target, operands, *options)
    annotate(new, **{k: first.meta[k] for k in COPIED_META if k in first.meta})
    (start,) = new[0].all_input_nodes[0].all_input_nodes
    for before, after in zip(old, new, strict=True):
        if before is None:
            graph.erase_node(after)
            continue
        after.meta = dict(before.meta)
        before.replace_all_uses_with(after)
        graph.erase_node(before)
        # Under `reduce_precision`, casts of earlier members to float32 stand before the bucket.
        _follow(after)
    for member in members:
        graph.erase_node(wait_of(member))
        graph.erase_node(member)
    return start


def _follow(result: fx.Node) -> None:
    """Moves the casts and copies of a result that was written behind them, in order."""
    place, pending = result, sorted(user for user in result.users if user < result)
    while pending:
        node = pending.pop(0)
        place.append(node)
        place = node
        pending += sorted(user for user in node.users if user < node and user not in pending)


def _behind(place: fx.Node, operands: Iterable[fx.Node]) -> list[fx.Node]:
    """Casts and copies of inputs behind a place that lead to operands, in order."""
    found, todo = set[fx.Node](), list(operands)
    while todo:
        node = todo.pop()
        if place < node and node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return sorted(found)


COPIED_META = ("placement", "batch_dims", "gradient", "summed")


def merge_statistics(graph: TrainingGraph) -> int:
    """Merges all-reduces of statistics with the next if possible; returns the number merged."""
    count, previous = 0, None
    found = (s for s in starts(graph) if s.target is start_all_reduce)
    for start in [s for s in found if "gradient" not in s.meta]:
        if previous is not None and can_merge(previous, start):
            previous = merge_collectives(graph.graph, [previous, start])
            count += 1
        else:
            previous = start
    return count


def can_merge(earlier: fx.Node, later: fx.Node) -> bool:
    """Whether two all-reduces are of one kind and phase, and nothing between reads the earlier.

    A sum of a gradient, which the optimizer alone awaits, would make compute wait with it.
    """
    kinds = {
        (tensors(n)[0].dtype, axis_of(n), op_of(n), n.meta["phase"], "summed" in n.meta)
        for n in (earlier, later)
    }
    uses = [user for result in results_of(earlier) if result for user in result.users]
    return len(kinds) == 1 and all(later < user for user in uses)


def _fill(items: Iterable[tuple[str, fx.Node]], limit: int) -> Iterator[Group]:
    """Groups of names in order; each dtype fills its own group, until the collective changes."""
    filling: dict[torch.dtype, tuple[list[str], int]] = {}
    last, known = None, set[str]()
    for name, start in items:
        if name in known:
            continue  # the all-reduce between nodes that follows a reduce-scatter
        known.add(name)
        if start.target is not last:
            yield from (tuple(group) for group, _ in filling.values())
            filling, last = {}, start.target
        operand = start.args[0][0]  # type: ignore[index]
        whole = max(tensor_bytes(tensors(n)[0]) for n in (operand, start))  # type: ignore[arg-type]
        dtype = tensors(start)[0].dtype
        group, size = filling.pop(dtype, ([], 0))
        if group and size + whole > limit:
            yield tuple(group)
            group, size = [], 0
        filling[dtype] = ([*group, name], size + whole)
    yield from (tuple(group) for group, _ in filling.values())
