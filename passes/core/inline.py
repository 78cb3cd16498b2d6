"""`inline`: writes the operators of a tensor function into a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from autopar._torch import TorchDispatchMode, pytree
from autopar.ir.placement import Placement, Varying

_VARYING = Varying()


def inline(
    graph: fx.Graph,
    like: fx.Node,
    function: Callable[..., Any],
    *arguments: Any,
    placement: Placement | None = _VARYING,
) -> Any:
    """Writes the operators that `function` runs at the insertion point.

    Args:
        graph: graph to write into.
        like: node whose phase, block, source and stage the new nodes take.
        function: function of tensors.
        arguments: arguments of `function`, with nodes for tensors.
        placement: placement of the new nodes along the data axis; None to set it later.

    Returns:
        Result of `function`, with nodes for tensors.
    """
    leaves, structure = pytree.tree_flatten(arguments)
    given = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    own = {node: node.meta["val"].detach() for node in given}  # ids differ if nodes share a value
    writer = _Writer(graph, like, own, placement)
    fakes = [own[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    with given[0].meta["val"].fake_mode, writer:
        results = function(*pytree.tree_unflatten(fakes, structure))
    return pytree.tree_map(writer.node, results)


class _Writer(TorchDispatchMode):
    """Writes a node for every operator that runs."""

    def __init__(
        self,
        graph: fx.Graph,
        like: fx.Node,
        given: Mapping[fx.Node, Any],
        placement: Placement | None,
    ) -> None:
        super().__init__()
        self.graph = graph
        keys = ("phase", "block", "source", "seq_nr", "stage")
        self.meta = {key: like.meta.get(key) for key in keys}
        if placement is not None:
            self.meta["placement"] = placement
        self.nodes = {id(value): node for node, value in given.items()}
        self.alive: list[Any] = [*given.values()]  # a freed tensor's id could be reused

    def node(self, value: Any) -> Any:
        """Node of a tensor; other values unchanged."""
        return self.nodes[id(value)] if isinstance(value, torch.Tensor) else value

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, (torch.Tensor, tuple, list)):
            given = pytree.tree_map(self.node, (args, dict(kwargs or {})))
            self._write(func, given[0], given[1], result)
        return result

    def _write(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.alive.append(result)
        node = self.graph.call_function(func, args, kwargs)
        node.meta = {**self.meta, "val": result}
        if isinstance(result, torch.Tensor):
            self.nodes[id(result)] = node
            return
        for place, part in enumerate(result):
            self.nodes[id(part)] = self.graph.call_function(operator.getitem, (node, place))
            self.nodes[id(part)].meta = {**self.meta, "val": part}
