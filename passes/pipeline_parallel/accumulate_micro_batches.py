"""`AccumulateMicroBatches`: sums over the batch as sums over micro-batches.

Micro-batches run one after the other, so no collective can sum over them. Averaging their losses
instead would train to other numbers, since they may ignore different numbers of targets.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.core.ir.batch_slicing import BATCH
from autopar.core.ir.graph import GraphProperty, TrainingGraph, has_batch_dim, source_line, tensors
from autopar.core.ir.roles import BatchTotal, MicrobatchPartial
from autopar.errors import CoupledRowsError
from autopar.passes.core.collective_ops import (
    axis_of,
    op_of,
    results_of,
    start_all_reduce,
    starts,
    wait_of,
)
from autopar.passes.core.node_builder import add_input, ancestors
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.passes.pipeline_parallel.stage_dependence import dependences


@dataclass(frozen=True)
class AccumulateMicroBatches(Pass):
    """Replaces each sum over the batch by the partial sum of a micro-batch and the total.

    Before: the graph of one micro-batch, with collectives over `BATCH`. After: the graph returns a
    `MicrobatchPartial` and takes a `BatchTotal` instead of each collective. Totals that depend on
    inputs alone are early. Other totals are late: they are available after all forwards. Tier:
    exact.
    """

    ensures = frozenset({GraphProperty.BATCH_SHARDED})

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to a copy of `graph`.

        Raises:
            CoupledRowsError: a forward needs a total over all forwards.
        """
        graph = graph.copy()
        sums = [start for start in starts(graph) if axis_of(start) == BATCH]
        if not sums:
            return PassResult(graph, "nothing is reduced over the batch")
        found, waits = dependences(graph), {wait_of(start) for start in sums}
        chained = {start for start in sums if not waits.isdisjoint(ancestors([start]))}
        for start in sums:
            is_sum = start.target is start_all_reduce and op_of(start) == "sum"
            # A total inside of a backward would need backwards of later micro-batches first.
            if not is_sum or start.meta["phase"] == "backward":
                raise _coupled(start)
            pairs = zip(start.args[0], results_of(start), strict=True)  # type: ignore[arg-type]
            for operand, result in pairs:
                if result is not None:
                    late = found[operand] != "inputs" or start in chained
                    graph = _accumulate(graph, operand, result, late)
            done = wait_of(start)
            for node in (*done.users, done, start):
                graph.graph.erase_node(node)
        _check(graph)
        return PassResult(graph)


def _accumulate(
    graph: TrainingGraph, operand: fx.Node, result: fx.Node, late: bool
) -> TrainingGraph:
    index = sum(isinstance(role, MicrobatchPartial) for role in graph.outputs)
    like = tensors(result)[0]
    graph, total = add_input(graph, BatchTotal(index, late), f"total_{index}", like)
    total.meta |= {k: v for k, v in result.meta.items() if k in ("batch_dims", "placement")}
    result.replace_all_uses_with(total)
    return graph.with_results({MicrobatchPartial(index): operand})


def _check(graph: TrainingGraph) -> None:
    """Checks that no batch dim and no other partial of a forward needs a late total."""
    found = dependences(graph)
    role_of = {n: r for r, n in zip(graph.outputs, graph.results, strict=True) if n is not None}
    for node in graph.calls():
        if node.meta["phase"] == "backward":
            return
        reads_total = any(found[n] == "totals" for n in node.all_input_nodes)
        is_partial = isinstance(role_of.get(node), MicrobatchPartial)
        if reads_total and (has_batch_dim(node) or is_partial):
            raise _coupled(node)


def _coupled(node: fx.Node) -> CoupledRowsError:
    line = source_line(node)
    return CoupledRowsError(
        "the model needs all rows of the batch before it goes on"
        + (f" ({line})" if line else "")
        + ", so micro-batches cannot run one after the other with the same result: give "
        "Strategy(micro_batches=1), or batch_semantics='local' to compute what DDP computes"
    )
