"""Leaves out logits beside a loss, so that the loss may be computed in chunks of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from autopar.core.common.notices import BorderNote
from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.roles import Output, OutputRole
from autopar.passes.chunks.row_search import HEADS
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.passes.core.untrained_outputs import outputs_beside_a_loss


@dataclass(frozen=True)
class LeaveOutLogits(Pass):
    """Leaves out outputs as large as logits beside a loss, before a model is split into stages.

    Before: the graph of a micro-batch. After: it returns no logits, so that `ChunkLoss` can divide
    the loss in its stage, and no rank receives them. Tier: exact.
    """

    def __call__(self, graph: TrainingGraph) -> PassResult:
        lean = without_logits(replace(graph, disposable=False).copy())
        if lean is None:
            return PassResult(graph, "there are no logits beside a loss")
        dropped = [role for role in graph.outputs if role not in lean.outputs]
        return PassResult(replace(lean, notes=(*graph.notes, *map(left_out, dropped))))


def left_out(role: OutputRole) -> BorderNote:
    """The note on an output that is left out."""
    assert isinstance(role, Output)
    return BorderNote(
        f"output {role.index} of the model is left out: the loss is computed in chunks, and "
        "reading it raises an error. Give Strategy(loss_chunks=1) to have it"
    )


def without_logits(graph: TrainingGraph) -> TrainingGraph | None:
    """The graph, changed in place, without outputs as large as logits; None if it keeps all.

    One scalar with a gradient remains, so that the model is trained by it.
    """
    beside = outputs_beside_a_loss(graph).items()
    dropped = {role: node for role, node in beside if _is_of_product(node)}
    if not dropped:
        return None
    table = zip(graph.outputs, graph.results, strict=True)
    kept = {role: node for role, node in table if role not in dropped}
    graph.output_node.args = (list(kept.values()),)
    for node in dropped.values():
        _erase_unread(graph.graph, node)
    return replace(graph, outputs=tuple(kept))


def _is_of_product(node: fx.Node) -> bool:
    """Whether a value has numbers of a product's result, several a row."""
    source = node
    for source in _sources(node):
        if source.target in HEADS:
            rows = tensors(source)[0].shape[0]
            return tensors(node)[0].numel() > rows
    return False


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """A value, and the first operands that it was computed from, up to a product."""
    while node.op == "call_function":
        yield node
        first = node.all_input_nodes
        if node.target in HEADS or not first:
            return
        node = first[0]


def _erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    pending = [node]
    while pending:
        node = pending.pop()
        if node.op == "call_function" and not node.users:
            pending += node.all_input_nodes
            graph.erase_node(node)
