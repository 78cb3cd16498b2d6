"""`ShardReplicated`: parameters that cp or ep replicates, sharded over it between steps (ZeRO).

Ranks that share a sequence hold the same parameters, and ranks that share experts the same dense
ones. In mixed precision these are 16 bytes a parameter on each rank; over 8 ranks, 2 remain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.placement import chunk_of
from autopar.core.ir.roles import Gradient, OutputRole, Parameter
from autopar.passes.core.collective_ops import (
    annotate,
    axis_of,
    collective,
    is_name,
    op_of,
    start_all_reduce,
    start_reduce_scatter,
    value_of,
)
from autopar.passes.core.node_builder import aten, call, result_of, value
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.passes.data_parallel.shard_parameters import (
    Chunk,
    shard_inputs,
    swapped,
)

IN_PLACE = frozenset({aten._to_copy.default, aten.clone.default})
"""Operators that leave every element in its place."""


@dataclass(frozen=True)
class ShardReplicated(Pass):
    """Shards parameters that a partitioned axis replicates over that axis.

    Before: the parameters in `dims` are whole on every rank of the axis, and so are their
    gradients. After: a rank has its chunk of both. A gather precedes the first use of each. Stage 3
    gathers again for the backward, as `ShardParameters` does. A sum of a gradient over the axis
    becomes a reduce-scatter, and of another gradient the chunk is kept. Tier: exact.

    Attributes:
        axis: name of the mesh axis.
        rank: this rank's coordinate on the axis.
        stages: ZeRO stage of each block.
        dims: name and sharded dim of each parameter.
    """

    axis: str
    rank: int
    stages: tuple[tuple[str, int], ...]
    dims: tuple[tuple[str, int], ...]

    def __call__(self, graph: TrainingGraph) -> PassResult:
        chunks = {
            name: Chunk(dim, self.axis, self.rank)
            for name, dim in self.dims
            if name in graph.parameters
        }
        if not chunks:
            return PassResult(graph, "the graph has none of these parameters")
        graph = graph.copy()
        shard_inputs(graph, chunks, dict(self.stages))
        gradients = {
            role: node
            for role, node in zip(graph.outputs, graph.results, strict=True)
            if isinstance(role, Gradient)
            and isinstance(role.of, Parameter)
            and role.of.name in chunks
            and node is not None
        }
        scattered: dict[OutputRole, fx.Node | None] = {
            role: scatter(graph, node, chunks[role.of.name], role.of.name)  # type: ignore[union-attr]
            for role, node in gradients.items()
        }
        graph = graph.with_results(scattered)
        for node in gradients.values():
            erase_unread(graph.graph, node)
        local = {
            name: replace(info, shape=chunks[name].shape(graph, info)) if name in chunks else info
            for name, info in graph.parameters.items()
        }
        partitioned = tuple(dict.fromkeys((*graph.partitioned, self.axis)))
        return PassResult(replace(graph, parameters=local, partitioned=partitioned))


@dataclass
class _Sum:
    """The sum of a gradient over an axis, and what follows it up to the gradient.

    Attributes:
        start: the all-reduce.
        dim: sharded dim in the operand of the all-reduce.
        behind: operators behind it, in order.
    """

    start: fx.Node
    dim: int
    behind: list[fx.Node]


def scatter(graph: TrainingGraph, gradient: fx.Node, chunk: Chunk, name: str) -> fx.Node:
    """Writes a rank's chunk of a gradient that is whole on all ranks of an axis."""
    graph.graph.inserting_before(gradient.next)
    total = _sum_of(gradient, chunk)
    rows = gradient.meta["val"].shape[chunk.dim]
    begin, width = chunk_of(rows, graph.axes[chunk.axis], chunk.rank)
    if total is None:
        end = begin + width
        part = call(graph.graph, gradient, aten.slice.Tensor, gradient, chunk.dim, begin, end)
        copy = call(graph.graph, gradient, aten.clone.default, part)
        for node in (part, copy):
            node.meta |= {key: gradient.meta[key] for key in KEPT if key in gradient.meta}
        return copy
    (operand,) = total.start.all_input_nodes
    graph.graph.inserting_before(total.start)
    front = swapped(graph.graph, total.start, operand, total.dim)
    (part,) = collective(
        graph.graph, total.start, start_reduce_scatter, [front], [width], chunk.axis
    )
    kept = {key: operand.meta[key] for key in KEPT if key in operand.meta}
    annotate([part], summed=name, **kept)
    node = swapped(graph.graph, total.start, part, total.dim)
    for later in total.behind:
        node = _again(graph.graph, later, node)
    return node


KEPT = ("placement", "batch_dims")


def _again(graph: fx.Graph, node: fx.Node, operand: fx.Node) -> fx.Node:
    """Writes an operator behind itself, on a chunk of what it reads."""
    graph.inserting_before(node.next)
    if node.target is start_all_reduce:
        (total,) = collective(graph, node, start_all_reduce, [operand], *node.args[1:])
        kept = {key: node.meta[key] for key in (*KEPT, "summed") if key in node.meta}
        annotate([total], **kept)
        return total
    (source,) = node.all_input_nodes
    copy = graph.node_copy(node, lambda n: operand if n is source else n)
    copy.meta = {**node.meta, "val": result_of(copy.target, value(copy.args), value(copy.kwargs))}  # type: ignore[arg-type]
    return copy


def _sum_of(gradient: fx.Node, chunk: Chunk) -> _Sum | None:
    """The sum over an axis that a gradient is, but for casts and permutations; None if none is."""
    behind, node, dim = list[fx.Node](), gradient, chunk.dim
    # A value with other readers is needed whole, so its sum stays an all-reduce.
    while node is gradient or len(node.users) == 1:
        if is_name(node):
            start = value_of(node).node
            if start.target is not start_all_reduce or len(start.all_input_nodes) > 1:
                return None
            if op_of(start) != "sum":
                return None
            if axis_of(start) == chunk.axis:
                return _Sum(start, dim, behind[::-1])
            behind.append(start)
            (node,) = start.all_input_nodes
            continue
        if node.target is aten.permute.default:
            dim = node.args[1][dim] % gradient.meta["val"].dim()  # type: ignore[index]
        elif node.target is aten.t.default:
            dim = 1 - dim
        elif node.target not in IN_PLACE:
            return None
        behind.append(node)
        (node,) = node.all_input_nodes
    return None


def erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    """Erases an operator that nothing reads, and those that it alone read."""
    pending = [node]
    while pending:
        node = pending.pop()
        if node.op == "call_function" and not node.users:
            pending += (n for n in node.all_input_nodes if n not in pending)
            graph.erase_node(node)
