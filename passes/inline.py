"""`inline`: a function of tensors, written into a graph as the operators that it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar._torch import pytree
from autopar.placement import Varying


def inline(graph: fx.Graph, like: fx.Node, function: Callable[..., Any], *arguments: Any) -> Any:
    """Writes what `function` does at the insertion point.

    Args:
        graph: to write into.
        like: phase, block, source and stage of the new nodes are its.
        function: of tensors; it makes no tensor out of numbers of its own.
        arguments: nodes, lists of nodes, and other values.

    Returns:
        What the function returns, with nodes in place of tensors.
    """
    leaves, structure = pytree.tree_flatten(arguments)
    given = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]

    def on_tensors(*values: Any) -> Any:
        left = iter(values)
        filled = [next(left) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        return function(*pytree.tree_unflatten(filled, structure))

    traced = make_fx(on_tensors)(*(node.meta["val"] for node in given)).graph
    traced.eliminate_dead_code()
    copies = dict(zip(traced.find_nodes(op="placeholder"), given, strict=True))
    for node in traced.nodes:
        if node.op == "call_function":
            copies[node] = _copy(graph, like, node, copies)
    return fx.map_arg(traced.output_node().args[0], copies.__getitem__)


def _copy(graph: fx.Graph, like: fx.Node, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    copy = graph.node_copy(node, copies.__getitem__)
    copy.meta = {key: like.meta.get(key) for key in ("phase", "block", "source", "seq_nr", "stage")}
    copy.meta |= {"val": node.meta["val"], "placement": Varying()}
    return copy
