"""`BucketTpGradients`: bucketed gradient reductions along a tensor-parallel axis.

The partition along an axis sums gradients one by one, each with the latency of a message. The
optimizer alone awaits these sums, so they can wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.core.ir.graph import TrainingGraph, tensor_bytes, tensors
from autopar.passes.communication.bucket_collectives import merge_collectives
from autopar.passes.core.collective_ops import axis_of, op_of, results_of, starts
from autopar.passes.core.node_builder import aten, is_view
from autopar.passes.core.pass_base import Pass, PassResult


@dataclass(frozen=True)
class BucketTpGradients(Pass):
    """Merges reductions of gradients that only the optimizer reads into buckets.

    Before: a partitioned graph that reduces each gradient once it is computed. After: consecutive
    reductions of one kind are one collective, which starts with its last member. Gradients have
    equal shapes on all ranks of the axis, so all ranks make the same buckets of up to `nbytes`.
    Tier: exact.
    """

    axis: str
    nbytes: int

    def __call__(self, graph: TrainingGraph) -> PassResult:
        graph = graph.copy()
        buckets = [bucket for bucket in self.buckets(graph) if len(bucket) > 1]
        for members in buckets:
            tails = [node for member in members for node in _tail(member)]
            start = merge_collectives(graph.graph, members)
            place = max(result for result in results_of(start) if result is not None)
            for node in tails:
                place.append(node)
                place = node
        return PassResult(graph, "" if buckets else "no two sums can travel together")

    def buckets(self, graph: TrainingGraph) -> Iterator[list[fx.Node]]:
        filling: dict[object, list[fx.Node]] = {}
        sizes: dict[object, int] = {}
        for start in starts(graph):
            if "summed" not in start.meta or axis_of(start) != self.axis or not _waits(start):
                continue
            kind = (start.target, tensors(start)[0].dtype, op_of(start))
            size = tensor_bytes(tensors(start.args[0][0])[0])  # type: ignore[index,arg-type]
            if sizes.get(kind, 0) + size > self.nbytes and kind in filling:
                yield filling.pop(kind)
                sizes[kind] = 0
            filling.setdefault(kind, []).append(start)
            sizes[kind] = sizes.get(kind, 0) + size
        yield from filling.values()


def _waits(start: fx.Node) -> bool:
    """Whether only views and the graph's output read the results of a reduction."""
    results = [result for result in results_of(start) if result is not None]
    ends = {*results, *_tail(start)}
    return all(user in ends or user.op == "output" for end in ends for user in end.users)


def _tail(start: fx.Node) -> list[fx.Node]:
    """The views and transposed copies of a collective's results, each after its source."""
    found = [result for result in results_of(start) if result is not None]
    for node in found:
        found += [user for user in node.users if _moves_with(user) and user not in found]
    return [node for node in found if _moves_with(node)]


def _moves_with(node: fx.Node) -> bool:
    """Whether a node is a view, or the copy that puts a sharded dim in place."""
    return is_view(node) or node.target is aten.transpose_copy.int
