"""Sums over the batch become sums over micro-batches that pass one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.errors import CoupledRowsError
from autopar.ir.batch_slicing import BATCH
from autopar.ir.graph import GraphProperty, TrainingGraph, has_batch_dim, tensors, user_line
from autopar.ir.roles import BatchTotal, MicrobatchPartial
from autopar.passes.core.collective_ops import (
    axis_of,
    op_of,
    results_of,
    start_all_reduce,
    starts,
    wait_of,
)
from autopar.passes.core.node_builder import add_input
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.passes.pipeline_parallel.stage_dependence import dependences


@dataclass(frozen=True)
class AccumulateMicroBatches(Pass):
    """Replaces each sum over the batch by what a micro-batch adds, and the total.

    Before: the graph of one micro-batch, with sums over `BATCH` where the whole batch is reduced
    over. After: it has none; it returns `MicrobatchPartial`s, and takes each `BatchTotal`: early
    ones, known from the inputs alone, and late ones, known when all forwards have run. Tier: exact.
    """

    ensures = frozenset({GraphProperty.BATCH_SHARDED})

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to a copy of `graph`.

        Raises:
            CoupledRowsError: some rows need a total before the forwards have run.
        """
        graph = graph.copy()
        sums = [start for start in starts(graph) if axis_of(start) == BATCH]
        if not sums:
            return PassResult(graph, "nothing is reduced over the batch")
        kinds, waits = dependences(graph), {wait_of(start) for start in sums}
        chained = {start for start in sums if not waits.isdisjoint(_ancestors(start))}
        for start in sums:
            is_sum = start.target is start_all_reduce and op_of(start) == "sum"
            if not is_sum or start.meta["phase"] == "backward":
                raise _cannot(start)
            pairs = zip(start.args[0], results_of(start), strict=True)  # type: ignore[arg-type]
            for operand, result in pairs:
                if result is not None:
                    late = kinds[operand] != "free" or start in chained
                    graph = _replaced(graph, operand, result, late)
            done = wait_of(start)
            for item in list(done.users):
                graph.graph.erase_node(item)
            graph.graph.erase_node(done)
            graph.graph.erase_node(start)
        _check(graph)
        return PassResult(graph)


def _replaced(graph: TrainingGraph, operand: fx.Node, result: fx.Node, late: bool) -> TrainingGraph:
    """Returns a part and takes the total in the place of a sum."""
    index = sum(isinstance(role, MicrobatchPartial) for role in graph.outputs)
    like = tensors(result)[0]
    graph, total = add_input(graph, BatchTotal(index, late), f"total_{index}", like)
    total.meta |= {k: v for k, v in result.meta.items() if k in ("batch_dims", "placement")}
    result.replace_all_uses_with(total)
    return graph.with_results({MicrobatchPartial(index): operand})


def _ancestors(start: fx.Node) -> Iterator[fx.Node]:
    """All that a sum depends on."""
    seen, todo = set[fx.Node](), list(start.all_input_nodes)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += node.all_input_nodes


def _check(graph: TrainingGraph) -> None:
    """No rows, and no other part, may need a late total in the forward."""
    kinds = dependences(graph)
    returned = {n: r for r, n in zip(graph.outputs, graph.results, strict=True) if n is not None}
    for node in graph.calls():
        if node.meta["phase"] == "backward":
            return
        needs = any(kinds[n] == "late" for n in node.all_input_nodes)
        if needs and (has_batch_dim(node) or isinstance(returned.get(node), MicrobatchPartial)):
            raise _cannot(node)


def _cannot(node: fx.Node) -> CoupledRowsError:
    line = user_line(node)
    return CoupledRowsError(
        "the model needs all rows of the batch before it goes on"
        + (f" ({line})" if line else "")
        + ", so micro-batches cannot pass one after the other and give the same: give "
        "Strategy(micro_batches=1), or batch_semantics='local' for what DDP computes"
    )
