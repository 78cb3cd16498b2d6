"""Merges the sums of gradients along an axis that the model is partitioned over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.ir.graph import TrainingGraph, tensor_bytes, tensors
from autopar.passes.communication.bucket_collectives import merge_collectives
from autopar.passes.core.collective_ops import axis_of, op_of, results_of, starts
from autopar.passes.core.node_builder import is_view
from autopar.passes.core.pass_base import Pass, PassResult


@dataclass(frozen=True)
class BucketTpGradients(Pass):
    """Merges sums of gradients, which nothing but the optimizer waits for, into buckets.

    Before: a partitioned graph, in which a gradient is summed where it is made. After: sums of
    one kind that follow each other are one collective, which starts where its last member did.
    Every rank of the axis makes the same buckets, for what it sums is of the same size on all.
    Tier: exact.

    Attributes:
        axis: the mesh axis.
        nbytes: size of a bucket at most, in bytes.
    """

    axis: str
    nbytes: int

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to a copy of `graph`."""
        graph = graph.copy()
        buckets = [bucket for bucket in self.buckets(graph) if len(bucket) > 1]
        for members in buckets:
            tails = [node for member in members for node in _tail(member)]
            place = max(_results(merge_collectives(graph.graph, members)))
            for node in tails:
                place.append(node)
                place = node
        return PassResult(graph, "" if buckets else "no two sums can travel together")

    def buckets(self, graph: TrainingGraph) -> Iterator[list[fx.Node]]:
        """The sums that travel together."""
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
    """Whether nothing reads a sum before the step's end, but to look at it in another shape."""
    ends = {*_results(start), *_tail(start)}
    return all(user in ends or user.op == "output" for end in ends for user in end.users)


def _results(start: fx.Node) -> list[fx.Node]:
    return [result for result in results_of(start) if result is not None]


def _tail(start: fx.Node) -> list[fx.Node]:
    """The views of a collective's results, in order."""
    results = _results(start)
    found = list(results)
    for node in found:
        found += [user for user in node.users if is_view(user) and user not in found]
    return found[len(results) :]
