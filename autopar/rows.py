"""Which dimensions of which values run over the rows of the batch, and which numbers count them.

The call is captured twice, at a rank's rows and at those of the whole batch. What changed its size
runs over rows; what number changed in the code (`x.shape[0]`) counts them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.capture import Call, Capture
from autopar.errors import CaptureError
from autopar.graph import (
    Gradient,
    Input,
    Parameter,
    Tangent,
    TrainingGraph,
    elements,
    user_line,
)
from autopar.notices import Difference
from autopar.one_row import Captures, one_as_more
from autopar.pairs import operator_name, paired
from autopar.placement import even_rows

DIVIDE_BY_ROWS = (
    "mse_loss_backward",
    "smooth_l1_loss_backward",
    "huber_loss_backward",
    "binary_cross_entropy_backward",
    "soft_margin_loss_backward",
    "native_batch_norm_backward",
)


def mark_rows(capture: Captures, call: Call, rows: int, total: int, ranks: int) -> Capture:
    """Captures `call` at a rank's `rows` and marks what depends on the number of rows.

    Every node gets `meta["rows"]`: for each element that it yields, the dims that run over the
    rows; and `meta["uneven"]`: whether some element's size is not in proportion to them. Where a
    number in the code is another for the `total` rows of the global batch, `meta["whole"]` holds
    it, by its place among the arguments. Of one row the model does what it does of more.

    If the model does something else for every other number of rows, a tensor of one dim or more
    that depends on the batch is taken to have rows, but not in proportion to them, gradients of
    parameters have none, and the graph gets a note.

    Raises:
        CaptureError: so it does, and the ranks have different numbers of rows: they would not
            run the same collectives. Every rank finds so alike. Or the model differentiates twice
            through an operator that divides by the rows.
    """
    sizes = {size for size in even_rows(total, ranks) if size}
    wanted = (sizes | {total}) - {rows}

    def seen(capture: Captures) -> tuple[Capture, dict[int, _Other | None]]:
        first = capture(call)
        return first, {size: _alike_at(first, capture, call, rows, size) for size in wanted}

    first, others = seen(capture)
    if 1 in (rows, *wanted) and not all(others.values()):
        as_more = seen(one_as_more(capture))
        first, others = as_more if all(as_more[1].values()) else (first, others)
    _check_differentiated_once(first.graph)
    whole = others.get(total)
    if whole is not None and all(others.values()):
        _mark_by_comparison(whole, rows, total)
        _mark_numbers(whole, first.graph)
        return first
    if len(sizes) > 1:
        raise CaptureError(
            f"the model does not do the same for {' and '.join(map(str, sorted(sizes)))} rows, "
            f"into which {total} rows are divided over {ranks} ranks. Give a batch that divides "
            "evenly, or let autopar fall back (fallback=True)."
        )
    for other in (rows + 1, 2 * rows + 1):
        if second := _alike_at(first, capture, call, rows, other):
            _mark_by_comparison(second, rows, other)
            return _noted(first, f"the model does not do the same for {rows} and {total} rows")
    _mark_by_dependence(first.graph, call)
    return _noted(
        first,
        f"the graph differs between {rows} and {rows + 1} rows, so which reductions run over the "
        "batch is not known: each rank's stay its own, and what is returned is averaged, as by DDP",
    )


def _check_differentiated_once(graph: TrainingGraph) -> None:
    """Gradients inside of the forward must not hide a division by a rank's own rows."""
    for node in graph.calls():
        if node.meta["phase"] == "forward" and operator_name(node) in DIVIDE_BY_ROWS:
            line = user_line(node)
            raise CaptureError(
                f"{node.target} is differentiated twice{f', from {line}' if line else ''}, which "
                "autopar cannot do over the global batch. Write this loss out with tensor "
                "operations, or let autopar fall back (fallback=True)."
            )


@dataclass(frozen=True)
class _Other:
    """The same call at another number of rows.

    Attributes:
        graph: as captured.
        pairs: of the nodes of the graph of fewer rows, each with its counterpart in the other.
    """

    graph: TrainingGraph
    pairs: tuple[tuple[fx.Node, fx.Node], ...]


def _alike_at(
    first: Capture, capture: Captures, call: Call, rows: int, other: int
) -> _Other | None:
    """The call captured at other rows, if that gives the same operators."""
    try:
        second = capture(call.with_rows(other)).graph
    except CaptureError:
        return None
    few, many = (first.graph, second) if rows < other else (second, first.graph)
    pairs = paired(few, many)
    return None if pairs is None else _Other(second, pairs)


def _noted(capture: Capture, text: str) -> Capture:
    notes = (*capture.graph.notes, Difference(text))
    return replace(capture, graph=replace(capture.graph, notes=notes))


def _mark_by_comparison(second: _Other, rows: int, other: int) -> None:
    for a, b in second.pairs:
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


def _mark_numbers(second: _Other, first: TrainingGraph) -> None:
    for a, b in second.pairs:
        if a.op == "get_attr":
            own, whole = first.constants[str(a.target)], second.graph.constants[str(b.target)]
            if own.shape == whole.shape and not own.equal(whole):
                a.meta["whole"] = {"": whole}
        elif a.op == "call_function":
            pairs: list[tuple[Any, Any]] = [*enumerate(zip(a.args, b.args, strict=True))]
            pairs += [(k, (v, b.kwargs[k])) for k, v in a.kwargs.items()]
            changed = {k: y for k, (x, y) in pairs if _is_number(a, k) and x != y}
            if changed:
                a.meta["whole"] = changed


def _is_number(node: fx.Node, place: int | str) -> bool:
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
        depends = isinstance(role, Tangent)
        depends = depends or (isinstance(role, Input) and call.has_rows[role.index])
        depends = depends or any(n.meta["depends"] for n in node.all_input_nodes)
        node.meta["depends"] = depends
        node.meta["rows"] = tuple(
            (0,) if depends and isinstance(t, torch.Tensor) and t.dim() else ()
            for t in elements(node)
        )
        node.meta["uneven"] = depends
    for of, result in zip(graph.outputs, graph.results, strict=True):
        if isinstance(of, Gradient) and isinstance(of.of, Parameter) and result is not None:
            result.meta["rows"] = ((),) * len(elements(result))
