"""Computes the loss in chunks of rows, so that logits and their gradients are never whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import getitem

import torch
from torch import fx

from autopar.core.common.notices import BorderNote
from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.roles import Tangent
from autopar.passes.chunks.chunk_writer import write_chunks, write_chunks_early
from autopar.passes.chunks.early_gradients import early_gradients
from autopar.passes.chunks.leave_out_logits import left_out, without_logits
from autopar.passes.chunks.row_search import Region, find_region
from autopar.passes.core.node_builder import aten, call
from autopar.passes.core.pass_base import Pass, PassResult

MEAN, SUM = 1, 2


@dataclass(frozen=True)
class ChunkLoss(Pass):
    """Computes the last product before the loss, and all that sees its rows apart, chunk by chunk.

    Before: the product makes logits of all rows, from which the loss and the gradients of the
    product's operands follow. After: each chunk of rows has these operators of its own. What has
    rows is concatenated, sums over rows are added. Where one number of the backward scales all
    gradients, as in a mean over tokens, the forward computes them for 1. Otherwise the backward
    computes the logits of a chunk once more. An operator outside that reads them makes the pass
    decline, and so does one that combines rows other than by a sum. Tier: exact.

    Attributes:
        chunks: number of chunks; the last may be smaller.
        may_drop: whether outputs with rows of the logits, beside a loss, may be left out.
        early: whether the forward may compute gradients. It keeps those of the product's weight
            until the backward.
    """

    chunks: int
    may_drop: bool = False
    early: bool = True

    def __call__(self, graph: TrainingGraph) -> PassResult:
        if self.chunks < 2:
            return PassResult(graph, "there is one chunk")
        if graph.backward_start.op == "output":
            return PassResult(graph, "there is no backward")
        if not any(isinstance(role, Tangent) for role in graph.inputs):
            return PassResult(graph, "the loss is in another stage")
        changed = replace(graph, disposable=False).copy()  # a decline returns `graph` unchanged
        for node in list(changed.calls()):
            _sum_for_mean(changed.graph, node)
        found = find_region(changed, self.chunks)
        if isinstance(found, str) and self.may_drop and (lean := without_logits(changed)):
            changed, again = lean, find_region(lean, self.chunks)
            found = again if isinstance(again, Region) else found
        if isinstance(found, str):
            note = f"loss_chunks={self.chunks}: the loss is computed as a whole: {found}"
            return PassResult(replace(graph, notes=(*graph.notes, BorderNote(note))), found)
        dropped = [role for role in graph.outputs if role not in changed.outputs]
        early = early_gradients(found, list(changed.graph.nodes)) if self.early else None
        if early is None:
            write_chunks(changed, found, self.chunks)
        else:
            write_chunks_early(changed, found, self.chunks, early)
        return PassResult(replace(changed, notes=(*graph.notes, *map(left_out, dropped))))


# Means.


def _sum_for_mean(graph: fx.Graph, node: fx.Node) -> None:
    """Replaces a mean over rows by a sum and a quotient, which chunks can be added up to."""
    if node.target is aten.nll_loss_backward.default and node.args[4] in (MEAN, SUM):
        _sum_of_gradients(graph, node)
        return
    if node.meta["phase"] != "forward":
        return
    if node.target is aten.nll_loss_forward.default and node.args[3] == MEAN:
        _sum_of_losses(graph, node)
    elif node.target is aten.mean.default and _is_wide_enough(node):
        _sum_of_values(graph, node)


def _is_wide_enough(node: fx.Node) -> bool:
    return bool(tensors(node)[0].itemsize >= 4) and tensors(node.all_input_nodes[0])[0].dim() > 1


def _sum_of_losses(graph: fx.Graph, node: fx.Node) -> None:
    if tensors(node)[0].dtype == torch.float16:
        return  # a sum may exceed its range
    items = {user.args[1]: user for user in node.users}
    log, target, weights, _, ignored = node.args
    with graph.inserting_before(node):
        operator = aten.nll_loss_forward.default
        pair = _like(node, call(graph, node, operator, log, target, weights, SUM, ignored))
        total, weight = (_like(node, call(graph, node, getitem, pair, i)) for i in (0, 1))
        mean = _like(node, call(graph, node, aten.div.Tensor, total, weight))
    for place, new in ((0, mean), (1, weight)):
        if place in items:
            items[place].replace_all_uses_with(new)
            graph.erase_node(items[place])
    graph.erase_node(node)


def _sum_of_gradients(graph: fx.Graph, node: fx.Node) -> None:
    each, log, target, weights, reduction, ignored, total = node.args
    assert isinstance(total, fx.Node)
    if tensors(node)[0].dtype == torch.float16 or (reduction == MEAN and weights is not None):
        return  # a target of weight 0 has the gradient 0 / 0 where there is no other
    with graph.inserting_before(node):
        if reduction == MEAN:
            is_some = _like(node, call(graph, node, aten.ne.Scalar, total, 0))
            each = _like(node, call(graph, node, aten.div.Tensor, each, total))
            each = _like(node, call(graph, node, aten.where.ScalarOther, is_some, each, 0))
        # A sum does not read the weight of all targets, which ranks may still be adding up.
        options = {"dtype": tensors(total)[0].dtype, "device": tensors(total)[0].device}
        one = _like(node, call(graph, node, aten.full.default, [], 1, **options))
        operator = aten.nll_loss_backward.default
        new = call(graph, node, operator, each, log, target, weights, SUM, ignored, one)
    node.replace_all_uses_with(_like(node, new))
    graph.erase_node(node)


def _sum_of_values(graph: fx.Graph, node: fx.Node) -> None:
    (source,) = node.all_input_nodes
    dtype = {"dtype": tensors(node)[0].dtype}
    with graph.inserting_before(node):
        total = _like(node, call(graph, node, aten.sum.default, source, **dtype))
        count = tensors(source)[0].numel()
        mean = _like(node, call(graph, node, aten.div.Scalar, total, count))
    node.replace_all_uses_with(mean)
    graph.erase_node(node)


def _like(node: fx.Node, new: fx.Node) -> fx.Node:
    new.meta |= {k: node.meta[k] for k in ("placement", "batch_dims") if k in node.meta}
    return new
