"""Compiles graphs with a backend of torch.compile, or with inductor and donated arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from autopar._torch import OpOverload, inductor_compile
from autopar.ir.graph import TrainingGraph
from autopar.passes.core.node_builder import is_view

BoxedFunction = Callable[[list[Any]], list[Any]]
"""Takes a list of arguments and empties it."""


def compile_graph(
    module: fx.GraphModule, backend: str, donated: Sequence[int] = ()
) -> BoxedFunction:
    """Compiles a graph.

    Args:
        module: the graph.
        backend: name of a backend of torch.compile.
        donated: positions of arguments that may be overwritten.
    """
    if backend == "inductor":
        return _compile_with_inductor(_with_boxed_arguments(module), donated)
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)

    def run(arguments: list[Any]) -> list[Any]:
        values = tuple(arguments)
        arguments.clear()
        with torch.no_grad():
            return list(compiled(*values))

    return run


def donated_args(forward: TrainingGraph, backward: TrainingGraph) -> tuple[int, ...]:
    """Positions of saved tensors of a backward whose storage nothing else uses."""
    saved = dict(zip(forward.outputs, forward.results, strict=True))
    owners = Counter(_storage_owner(node) for node in forward.results if node is not None)
    return tuple(
        place
        for place, role in enumerate(backward.inputs)
        if (node := saved.get(role)) is not None  # type: ignore[arg-type]
        and owners[owner := _storage_owner(node)] == 1
        and _is_aten_result(owner)
    )


def _storage_owner(node: fx.Node) -> fx.Node:
    """The node that allocated the storage of a value."""
    while is_view(node) or _is_mutable(node) or (_is_item(node) and is_view(_sequence_of(node))):
        node = node.all_input_nodes[0]
    return node


def _is_aten_result(node: fx.Node) -> bool:
    """Whether an aten operator allocated a value; collectives keep references to buffers."""
    target = (_sequence_of(node) if _is_item(node) else node).target
    return isinstance(target, OpOverload) and target.namespace in ("aten", "prims")


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is getitem


def _sequence_of(item: fx.Node) -> fx.Node:
    return item.all_input_nodes[0]


def _with_boxed_arguments(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with one list as its argument, which it may empty."""
    graph = fx.Graph()
    arguments = graph.placeholder("arguments")
    arguments.meta["steal_arg"] = True
    placeholders = module.graph.find_nodes(op="placeholder")
    items = {n: graph.call_function(getitem, (arguments, i)) for i, n in enumerate(placeholders)}
    graph.output(graph.graph_copy(module.graph, items))
    return fx.GraphModule(module, graph)


def _compile_with_inductor(module: fx.GraphModule, donated: Sequence[int]) -> BoxedFunction:
    """Compiles at the first call with each set of strides, which inductor specializes on.

    torch.compile would keep every argument alive until the end of the call.
    """
    compiled: dict[Any, Callable[[list[Any]], Any]] = {}

    def run(arguments: list[Any]) -> list[Any]:
        strides = tuple(value.stride() for value in arguments)
        with torch.no_grad():
            if strides not in compiled:
                compiled[strides] = inductor_compile(module, arguments, donated)
            return list(compiled[strides](arguments))

    return run
