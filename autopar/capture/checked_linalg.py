"""Matrix factorisations that fail in a graph return NaN, since a graph cannot raise.

Eager `torch.linalg` functions raise for a singular or not positive definite matrix, by reading the
status `info` of the kernel. A captured graph replaces the results of such a matrix by NaN.
Operators whose `info` the model reads, such as `cholesky_ex`, keep the kernel's results.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar._torch import OpOverload

aten = torch.ops.aten


def mark_failures(graph: fx.Graph) -> None:
    """Adds NaN to the results of every factorisation whose status the model does not read."""
    for node in list(graph.nodes):
        place = _status_place(node)
        if place is None:
            continue
        elements = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if place in elements and elements[place].users:
            continue
        for index, result in elements.items():
            if index != place and _has_nan(result.meta["val"]):
                _mark(graph, node, place, result)


def _status_place(node: fx.Node) -> int | None:
    """The index of `info` among the results of an operator."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    names = [result.name for result in node.target._schema.returns]
    return names.index("info") if "info" in names else None


def _has_nan(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _mark(graph: fx.Graph, source: fx.Node, place: int, result: fx.Node) -> None:
    """Replaces a result by NaN for each matrix with a status other than 0."""
    users, value, known = list(result.users), result.meta["val"], source.meta["val"][place]

    def op(target: Callable[..., Any], *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        fakes = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        node.meta = {**result.meta, "val": target(*fakes)}
        return node

    with graph.inserting_before(result.next), value.fake_mode:
        failed = op(aten.ne.Scalar, op(operator.getitem, source, place), 0)
        shape = [*known.shape, *[1] * (value.dim() - known.dim())]
        made = op(aten.masked_fill.Scalar, result, op(aten.view.default, failed, shape), math.nan)
    for user in users:
        user.replace_input_with(result, made)
