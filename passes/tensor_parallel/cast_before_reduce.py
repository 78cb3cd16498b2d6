"""`CastBeforeReduce`: gradients cast to the dtype of their parameter before sums along an axis.

Under autocast, partitioned axes would sum weight gradients in bf16 and cast the sums. Sums along
the data axis are in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.roles import Gradient, Parameter
from autopar.passes.core.collective_ops import (
    annotate,
    axis_of,
    collective,
    op_of,
    replace_collective,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)
from autopar.passes.core.node_builder import aten, call, is_view, result_of, value
from autopar.passes.core.pass_base import Pass, PassResult


@dataclass(frozen=True)
class CastBeforeReduce(Pass):
    """Moves the cast of a gradient to a wider dtype before its sum along partitioned axes.

    Before: under autocast, the partition may sum a gradient in bf16 and cast the sum. After: each
    rank casts its part, and the sum is that of the wider dtype, as along the data axis. Sums that
    the optimizer alone awaits can then travel in buckets. Tier: exact.
    """

    def __call__(self, graph: TrainingGraph) -> PassResult:
        graph = graph.copy()
        # a value of the forward that runs again is summed as it was
        casts = [n for n in gradient_nodes(graph) if _widens(n) and not n.meta.get("recomputed")]
        moved = [_cast_first(graph, node) for node in casts]
        return PassResult(graph, "" if any(moved) else "no gradient is summed before its cast")


def gradient_nodes(graph: TrainingGraph) -> Iterator[fx.Node]:
    """Operators whose results only gradients of parameters depend on, the last first."""
    kinds: dict[fx.Node | None, bool] = {}
    for role, node in zip(graph.outputs, graph.results, strict=True):
        is_gradient = isinstance(role, Gradient) and isinstance(role.of, Parameter)
        kinds[node] = is_gradient and kinds.get(node, True)
    found = set[fx.Node]()
    for node in reversed(graph.graph.nodes):
        users = [user for user in node.users if user.op != "output"]
        if node.op == "call_function" and found.issuperset(users) and kinds.get(node, bool(users)):
            found.add(node)
            yield node


def _cast_first(graph: TrainingGraph, cast: fx.Node) -> bool:
    """Casts the operand of a collective instead of its result; whether that is possible."""
    between, node = list[fx.Node](), cast.all_input_nodes[0]
    while (is_view(node) or node.target is aten.clone.default) and len(node.users) == 1:
        between.append(node)
        node = node.all_input_nodes[0]
    if (
        len(node.users) != 1
        or not node.all_input_nodes
        or node.all_input_nodes[0].target is not wait
    ):
        return False
    (start,) = node.all_input_nodes[0].all_input_nodes
    sums = start.target in (start_all_reduce, start_reduce_scatter) and op_of(start) == "sum"
    if not sums or axis_of(start) not in graph.partitioned or len(start.args[0]) > 1:  # type: ignore[arg-type]
        return False
    graph.graph.inserting_before(start)
    (part,) = start.all_input_nodes
    wide = call(graph.graph, start, aten._to_copy.default, part, dtype=tensors(cast)[0].dtype)
    wide.meta |= {k: part.meta[k] for k in ("placement", "batch_dims") if k in part.meta}
    results = collective(graph.graph, start, start.target, [wide], *start.args[1:])
    if _is_returned(cast):  # else compute awaits the sum
        annotate(results, summed=cast.name)
    replace_collective(graph.graph, start, results)
    for view in reversed(between):
        view.meta["val"] = result_of(view.target, value(view.args), value(view.kwargs))  # type: ignore[arg-type]
    cast.replace_all_uses_with(cast.all_input_nodes[0])
    graph.graph.erase_node(cast)
    return True


def _is_returned(node: fx.Node) -> bool:
    """Whether only the output of the graph reads a node, or views and copies of it."""
    return all(
        user.op == "output"
        or ((is_view(user) or user.target is aten.clone.default) and _is_returned(user))
        for user in node.users
    )


def _widens(node: fx.Node) -> bool:
    """Whether a node only casts to a wider dtype."""
    if node.target is not aten._to_copy.default:
        return False
    (before,), (after,) = tensors(node.all_input_nodes[0]), tensors(node)
    same = before.device == after.device and before.stride() == after.stride()
    return same and before.is_floating_point() and before.itemsize < after.itemsize
