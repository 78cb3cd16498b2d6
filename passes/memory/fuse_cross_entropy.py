"""Fuses the backward of cross-entropy into one buffer.

Torch's two operators pass a second tensor as large as the logits between them, although it has only
one number for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.passes.core.node_builder import aten, call
from autopar.passes.core.pass_base import Pass, PassResult

MEAN, SUM = 1, 2


@dataclass(frozen=True)
class FuseCrossEntropy(Pass):
    """Computes the gradient of the logits as (softmax - one-hot) x scale, in place.

    Before: `nll_loss_backward` writes a tensor as large as the logits, which
    `_log_softmax_backward_data` reads. After: one buffer holds the softmax, which is scaled by row
    and corrected at the targets in place; ignored rows have scale zero. Losses with class weights
    do not change. Tier: exact.
    """

    def __call__(self, graph: TrainingGraph) -> PassResult:
        graph = graph.copy()
        found = [node for node in graph.calls() if _fits(node)]
        for node in found:
            _rewrite(graph.graph, node)
        return PassResult(graph, "" if found else "there is no backward of cross-entropy")


def _fits(node: fx.Node) -> bool:
    if node.target is not aten._log_softmax_backward_data.default:
        return False
    inner, log_probability, dim, dtype = node.args
    if not isinstance(inner, fx.Node) or inner.target is not aten.nll_loss_backward.default:
        return False
    fake = tensors(node)[0]
    same = inner.args[1] is log_probability and fake.dtype == dtype and fake.dim() == 2
    plain = inner.args[3] is None and inner.args[4] in (MEAN, SUM) and len(inner.users) == 1
    return bool(same and plain and dim in (1, -1))


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    inner, log_probability, *_ = node.args
    assert isinstance(inner, fx.Node)
    cotangent, _, target, _, reduction, ignored, total = inner.args

    def op(function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        result = call(graph, node, function, *args, **kwargs)
        result.meta |= {key: node.meta[key] for key in ("placement",) if key in node.meta}
        return result

    graph.inserting_before(node)
    counted = op(aten.ne.Scalar, target, ignored)
    # An ignored target, such as -100, is no valid index: its row adds zero to column 0 instead.
    place = op(aten.mul.Tensor, target, counted)
    each = op(aten.div.Tensor, cotangent, total) if reduction == MEAN else cotangent
    scale = op(aten.where.ScalarOther, counted, each, 0)  # 0, not NaN, if all targets are ignored
    column = op(aten.unsqueeze.default, scale, 1)
    places = op(aten.unsqueeze.default, place, 1)
    gradient = op(aten.exp.default, log_probability)
    gradient = op(aten.mul_.Tensor, gradient, column)
    gradient = op(aten.scatter_add_.default, gradient, 1, places, op(aten.neg.default, column))
    gradient.meta["batch_dims"] = node.meta.get("batch_dims")
    node.replace_all_uses_with(gradient)
    graph.erase_node(node)
    graph.erase_node(inner)
