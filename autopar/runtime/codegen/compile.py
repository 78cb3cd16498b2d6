"""A graph through a compiler: a backend of torch.compile, or inductor with arguments to spare."""

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


def compile_graph(
    module: fx.GraphModule, backend: str, donated: Sequence[int] = ()
) -> BoxedFunction:
    """A function that takes the module's arguments in a list and empties it.

    Args:
        module: what to compile.
        backend: name of a backend of torch.compile.
        donated: places of arguments that may be overwritten.
    """
    if backend == "inductor":
        return _inductor(_boxed(module), donated)
    through = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)

    def run(arguments: list[Any]) -> list[Any]:
        values = tuple(arguments)
        arguments.clear()
        with torch.no_grad():
            return list(through(*values))

    return run


def donated_args(forward: TrainingGraph, backward: TrainingGraph) -> tuple[int, ...]:
    """The places of what the forward saves in storages that nothing else looks at."""
    saved = dict(zip(forward.outputs, forward.results, strict=True))
    owners = Counter(_owner(node) for node in forward.results if node is not None)
    return tuple(
        place
        for place, role in enumerate(backward.inputs)
        if (node := saved.get(role)) is not None  # type: ignore[arg-type]
        and owners[_owner(node)] == 1
        and _is_fresh(_owner(node))
    )


def _owner(node: fx.Node) -> fx.Node:
    """The node that made the storage that a value lies in."""
    while is_view(node) or _is_mutable(node) or (_is_item(node) and is_view(_whole(node))):
        node = node.all_input_nodes[0]
    return node


def _is_fresh(node: fx.Node) -> bool:
    """Whether an operator of aten made a value: collectives keep a hand on their buffers."""
    maker = _whole(node) if _is_item(node) else node
    target = maker.target
    return isinstance(target, OpOverload) and target.namespace in ("aten", "prims")


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is getitem


def _whole(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]


def _boxed(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with all arguments in one list, marked as the graph's to empty."""
    graph = fx.Graph()
    arguments = graph.placeholder("arguments")
    arguments.meta["steal_arg"] = True
    given = module.graph.find_nodes(op="placeholder")
    items = {n: graph.call_function(getitem, (arguments, i)) for i, n in enumerate(given)}
    graph.output(graph.graph_copy(module.graph, items))
    return fx.GraphModule(module, graph)


def _inductor(module: fx.GraphModule, donated: Sequence[int]) -> BoxedFunction:
    """Compiled at the first call, for the strides met: inductor's kernels are for those alone.

    Through torch.compile its caller would hold every argument until the end of the call, and with
    them what the forward saved: 1.3 times the peak memory of a GPT's step.
    """
    found: dict[Any, Callable[[list[Any]], Any]] = {}

    def run(arguments: list[Any]) -> list[Any]:
        strides = tuple(value.stride() for value in arguments)
        with torch.no_grad():
            if strides not in found:
                found[strides] = inductor_compile(module, arguments, donated)
            return list(found[strides](arguments))

    return run
