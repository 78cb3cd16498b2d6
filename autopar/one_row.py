"""`one_as_more`: what a model does of one row, done as it does more.

Of one row torch copies nothing to lay it out, and its attention multiplies matrices by other
operators; some models too take another way. The single device runs the whole batch, so that is what
a rank of one row should do: the operators of two rows, with every size continued to one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.capture import Call, Capture
from autopar.errors import CaptureError
from autopar.graph import TrainingGraph, elements
from autopar.pairs import paired

Captures = Callable[[Call], Capture]
"""Captures a call."""


def one_as_more(capture: Captures) -> Captures:
    """What captures one row as two and three are, where these are alike; else as it is."""

    def captured(call: Call) -> Capture:
        own = capture(call)
        if call.with_rows(1).key != call.key:
            return own
        try:
            two, three = (capture(call.with_rows(rows)).graph for rows in (2, 3))
            roles = {(graph.inputs, graph.outputs) for graph in (own.graph, two, three)}
            return replace(own, graph=_continued(two, three)) if len(roles) == 1 else own
        except (CaptureError, _Unlike):
            return own

    return captured


class _Unlike(Exception):
    """Two graphs do not differ in sizes alone, or these do not go on to one row."""


def _continued(two: TrainingGraph, three: TrainingGraph) -> TrainingGraph:
    """The graph of two rows, at one."""
    graph = two.copy()
    pairs = paired(graph, three)
    if pairs is None or len(pairs) != len(three.graph.nodes):
        raise _Unlike
    with graph.fake_mode:
        for node, other in pairs:
            if node.op == "get_attr":
                one, more = graph.constants[str(node.target)], three.constants[str(other.target)]
                if one.shape != more.shape or not one.equal(more):
                    raise _Unlike
                continue
            node.args, node.kwargs = _before((node.args, node.kwargs), (other.args, other.kwargs))
            if node.op != "output":
                node.meta["val"] = _fake(node, other)
    return graph


def _before(two: Any, three: Any) -> Any:
    """What goes on from three by two to one: whole numbers do so in proportion."""
    if isinstance(two, fx.Node):
        return two
    if type(two) is not type(three):
        raise _Unlike
    if isinstance(two, dict):
        return {key: _before(two[key], three[key]) for key in two}
    if isinstance(two, (list, tuple)):
        if len(two) != len(three):
            raise _Unlike
        return type(two)(_before(a, b) for a, b in zip(two, three, strict=True))
    if type(two) is int:
        return 2 * two - three
    if two != three:
        raise _Unlike
    return two


def _fake(node: fx.Node, other: fx.Node) -> Any:
    """What a node gives of one row, which must have the sizes that two and three go on to."""
    known = zip(elements(node), elements(other), strict=True)
    wanted = [
        tuple(_before(list(a.shape), list(b.shape))) if isinstance(a, torch.Tensor) else None
        for a, b in known
    ]
    if node.op == "placeholder":
        (shape,), whole = wanted, node.meta["val"]
        if shape is None or shape == tuple(whole.shape):
            return whole
        return torch.empty(shape, dtype=whole.dtype, device=whole.device)
    assert callable(node.target)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
    try:
        found = node.target(*args, **kwargs)
    except Exception as error:  # whatever an operator has against these sizes
        raise _Unlike from error
    given = found if isinstance(found, (list, tuple)) else [found]
    sizes = [tuple(item.shape) if isinstance(item, torch.Tensor) else None for item in given]
    if sizes != wanted:
        raise _Unlike
    return found
