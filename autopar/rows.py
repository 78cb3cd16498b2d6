"""Which dimensions of which values run over the rows of the batch, and which numbers count them.

The call is captured twice, at a rank's rows and at those of the whole batch. What changed its size
runs over rows; what number changed in the code (`x.shape[0]`) counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from autopar.capture import Call, Capture
from autopar.errors import CaptureError
from autopar.graph import Input, TrainingGraph, elements, tensors, user_line
from autopar.placement import even_rows

DIVIDE_BY_ROWS = (
    "mse_loss_backward",
    "smooth_l1_loss_backward",
    "huber_loss_backward",
    "binary_cross_entropy_backward",
    "soft_margin_loss_backward",
    "native_batch_norm_backward",
)


def mark_rows(
    capture: Callable[[Call], Capture], call: Call, rows: int, total: int, ranks: int
) -> Capture:
    """Captures `call` at a rank's `rows` and marks what depends on the number of rows.

    Every node gets `meta["rows"]`: for each element that it yields, the dims that run over the
    rows; and `meta["uneven"]`: whether some element's size is not in proportion to them. Where a
    number in the code is another for the `total` rows of the global batch, `meta["whole"]` holds
    it, by its place among the arguments.

    If the model does something else for another number of rows, every tensor of one dim or more
    that depends on the batch is taken to have rows, and the graph gets a note.

    Raises:
        CaptureError: so it does, and the ranks have different numbers of rows: they would not
            run the same collectives. Every rank finds so alike. Or the model differentiates twice
            through an operator that divides by the rows.
    """
    first = capture(call)
    _check_differentiated_once(first.graph)
    sizes = {size for size in even_rows(total, ranks) if size}
    others = {size: _alike_at(first, capture, call, size) for size in (sizes | {total}) - {rows}}
    whole = others.get(total)
    if whole is not None and all(others.values()):
        _mark_by_comparison(first.graph, whole.graph, rows, total)
        _mark_numbers(first.graph, whole.graph)
        return first
    if len(sizes) > 1:
        raise CaptureError(
            f"the model does not do the same for {' and '.join(map(str, sorted(sizes)))} rows, "
            f"into which {total} rows are divided over {ranks} ranks. Give a batch that divides "
            "evenly, or let autopar fall back (fallback=True)."
        )
    for other in (rows + 1, 2 * rows + 1):
        if second := _alike_at(first, capture, call, other):
            _mark_by_comparison(first.graph, second.graph, rows, other)
            return _noted(first, f"the model does not do the same for {rows} and {total} rows")
    _mark_by_dependence(first.graph, call)
    return _noted(
        first,
        f"the graph differs between {rows} and {rows + 1} rows, so reductions over the batch "
        "are recognised by their shape alone",
    )


def _check_differentiated_once(graph: TrainingGraph) -> None:
    """Gradients inside of the forward must not hide a division by a rank's own rows."""
    for node in graph.calls():
        if node.meta["phase"] == "forward" and _base_name(node) in DIVIDE_BY_ROWS:
            line = user_line(node)
            raise CaptureError(
                f"{node.target} is differentiated twice{f', from {line}' if line else ''}, which "
                "autopar cannot do over the global batch. Write this loss out with tensor "
                "operations, or let autopar fall back (fallback=True)."
            )


def _base_name(node: torch.fx.Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def _alike_at(
    first: Capture, capture: Callable[[Call], Capture], call: Call, rows: int
) -> Capture | None:
    """The call captured at other rows, if that gives the same operators."""
    try:
        second = capture(call.with_rows(rows))
    except CaptureError:
        return None
    return second if _alike(first.graph, second.graph) else None


def _noted(capture: Capture, note: str) -> Capture:
    return replace(capture, graph=replace(capture.graph, notes=(*capture.graph.notes, note)))


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


def _mark_by_comparison(first: TrainingGraph, second: TrainingGraph, rows: int, other: int) -> None:
    for a, b in zip(first.graph.nodes, second.graph.nodes, strict=True):
        pairs = [
            (x, y) if isinstance(x, torch.Tensor) else (torch.empty(()),) * 2
            for x, y in zip(elements(a), elements(b), strict=True)
        ]
        a.meta["rows"] = tuple(
            tuple(d for d in range(x.dim()) if x.shape[d] != y.shape[d]) for x, y in pairs
        )
        a.meta["uneven"] = any(
            x.numel() * other != y.numel() * rows for x, y in pairs if x.shape != y.shape
        )


def _mark_numbers(first: TrainingGraph, second: TrainingGraph) -> None:
    for a, b in zip(first.graph.nodes, second.graph.nodes, strict=True):
        if a.op == "get_attr":
            own, whole = first.constants[a.target], second.constants[b.target]
            if own.shape == whole.shape and not own.equal(whole):
                a.meta["whole"] = {"": whole}
        elif a.op == "call_function":
            pairs = [*enumerate(zip(a.args, b.args, strict=True))]
            pairs += [(k, (v, b.kwargs[k])) for k, v in a.kwargs.items()]
            changed = {k: y for k, (x, y) in pairs if _is_number(a, k) and x != y}
            if changed:
                a.meta["whole"] = changed


def _is_number(node: torch.fx.Node, place: int | str) -> bool:
    """Whether an argument is a number to reckon with, not a size, dim or index."""
    schema = getattr(node.target, "_schema", None)
    for index, argument in enumerate(schema.arguments if schema else ()):
        if place in (index, argument.name):
            value = node.args[place] if isinstance(place, int) else node.kwargs[place]
            kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
            return kind in ("number", "float", "Tensor") and isinstance(value, (int, float))
    return False


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
