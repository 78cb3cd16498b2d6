"""Which dimensions of which values run over the rows of the batch.

The call is captured twice, with different numbers of rows; what changed its size runs over rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from autopar.capture import Call, Capture
from autopar.errors import CaptureError
from autopar.graph import Input, TrainingGraph, elements, tensors

Dims = tuple[tuple[int, ...], ...]


def mark_rows(capture: Callable[[Call], Capture], call: Call, rows: int) -> Capture:
    """Captures `call` and sets `meta["rows"]` of every node.

    `meta["rows"]` holds, for each element that the node yields, the dims that run over the rows.
    If the model cannot be captured with another number of rows, every tensor of one dim or more
    that depends on the batch is taken to have rows, and the graph gets a note.
    """
    first = capture(call)
    for other in (rows + 1, 2 * rows + 1):
        try:
            second = capture(call.with_rows(other))
        except CaptureError:
            continue
        if _alike(first.graph, second.graph):
            _mark_by_comparison(first.graph, second.graph)
            return first
    _mark_by_dependence(first.graph, call)
    note = (
        f"the graph differs between {rows} and {rows + 1} rows, so reductions over the batch "
        "are recognised by their shape alone"
    )
    return replace(first, graph=replace(first.graph, notes=(*first.graph.notes, note)))


def _alike(first: TrainingGraph, second: TrainingGraph) -> bool:
    if len(first.graph.nodes) != len(second.graph.nodes):
        return False
    pairs = zip(first.graph.nodes, second.graph.nodes, strict=True)
    return all(
        a.target == b.target
        and len(a.all_input_nodes) == len(b.all_input_nodes)
        and [t.dim() for t in tensors(a)] == [t.dim() for t in tensors(b)]
        for a, b in pairs
        if a.op != "placeholder"
    )


def _mark_by_comparison(first: TrainingGraph, second: TrainingGraph) -> None:
    for a, b in zip(first.graph.nodes, second.graph.nodes, strict=True):
        a.meta["rows"] = tuple(
            tuple(d for d in range(x.dim()) if x.shape[d] != y.shape[d])
            if isinstance(x, torch.Tensor)
            else ()
            for x, y in zip(elements(a), elements(b), strict=True)
        )


def _mark_by_dependence(graph: TrainingGraph, call: Call) -> None:
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    for node in graph.graph.nodes:
        role = roles.get(node)
        depends = isinstance(role, Input) and call.has_rows[role.index]
        depends = depends or any(n.meta["depends"] for n in node.all_input_nodes)
        node.meta["depends"] = depends
        node.meta["rows"] = tuple(
            (0,) if depends and isinstance(t, torch.Tensor) and t.dim() else ()
            for t in elements(node)
        )
