"""`equal_stages`: finds stages that are equal up to names, to lower and simulate them once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from torch import fx

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import Gradient, Parameter
from autopar.core.ir.signature import type_text
from autopar.core.plan.plan import Plan


def equal_stages(graphs: Sequence[TrainingGraph], plan: Plan) -> tuple[int, ...]:
    """Index of the first equal stage, for each stage.

    Equal stages have the same operators on tensors of the same types, with the same ZeRO
    stages, checkpointing and layouts of their blocks and parameters.
    """
    known: dict[tuple[Any, ...], int] = {}
    texts = (tuple(_text(graph, plan)) for graph in graphs)
    return tuple(known.setdefault(text, stage) for stage, text in enumerate(texts))


def parameter_names(one: TrainingGraph, other: TrainingGraph) -> dict[str, str]:
    """Name in `other` of each parameter of `one`; the graphs are equal up to names."""
    pairs = zip(one.inputs, other.inputs, strict=True)
    return {
        a.name: b.name for a, b in pairs if isinstance(a, Parameter) and isinstance(b, Parameter)
    }


def _text(graph: TrainingGraph, plan: Plan) -> Iterator[Any]:
    """Key of a graph's lowering, independent of names."""
    stages, levels = dict(plan.zero_stages), dict(plan.recompute)
    numbers: dict[fx.Node, int] = {}
    seen: dict[tuple[str, Any], int] = {}

    def number(kind: str, name: Any) -> int:
        return seen.setdefault((kind, name), len(seen))

    def plain(value: Any) -> Any:
        return fx.map_arg(value, lambda node: f"%{numbers[node]}")

    for node in graph.graph.nodes:
        numbers[node] = len(numbers)
        block = node.meta.get("block") or ""
        target = str(node.target) if node.op in ("call_function", "output") else node.op
        yield target, repr(plain(node.args)), repr(plain(node.kwargs))
        yield node.meta.get("phase"), type_text(node) if node.op != "output" else ""
        yield number("block", block), stages.get(block), levels.get(block), block in plan.offload
        yield repr(node.meta.get("batch_dims"))
    for role in (*graph.inputs, *graph.outputs):
        yield type(role).__name__
        while isinstance(role, Gradient):
            role = role.of
        if isinstance(role, Parameter):
            info = graph.parameters[role.name]
            yield number("parameter", role.name), info.requires_grad, info.shape, info.dtype
            yield number("block", info.block), stages.get(info.block), levels.get(info.block)
            yield str(graph.layouts.get(role.name))
            continue
        for field in fields(role):
            value = getattr(role, field.name)
            name = field.name in ("name", "value", "index", "of")
            yield number(type(role).__name__, value) if name else value
