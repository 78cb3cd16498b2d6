"""For a compiler: operators as the simple ones that it fuses, and equal ones written once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar._torch import OpOverload, inductor_decompositions, pytree
from autopar.cost_model.signature import signature
from autopar.graph import TrainingGraph
from autopar.passes.base import PassResult
from autopar.passes.build import is_random

KEPT = ("phase", "block", "source", "seq_nr", "placement")


@dataclass(frozen=True)
class DecomposeOperators:
    """Replaces operators by their decompositions, and equal operators on equal values by one.

    What forward and backward both compute, such as an activation before the weights of its norm,
    is one value then: kept by the forward or computed again, as `checkpoint_activations` finds
    cheaper, but no longer both. Inductor would decompose the two halves anyhow, each for itself.

    Before: a joint graph without operators in place. After: the same values.
    Tier: exact.
    """

    tier: ClassVar[Literal["exact", "lossy"]] = "exact"

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to a copy of `graph`."""
        writer = _Writer()
        for node in graph.graph.nodes:
            writer.write(node)
        output = writer.graph.output(writer.values[graph.output_node])
        output.meta = dict(graph.output_node.meta)
        writer.erase_unused()
        return PassResult(replace(graph, graph=writer.graph))


class _Writer:
    """Writes one graph into another.

    Attributes:
        graph: the new graph.
        values: what stands in it for each node of the old one: a node, or for several results a
            tuple of them.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self._table = inductor_decompositions()
        self._traces: dict[str, fx.GraphModule | None] = {}
        self._written: dict[Any, fx.Node] = {}

    def write(self, node: fx.Node) -> None:
        """Write a node of the old graph, or what it decomposes into."""
        if node.op == "output":
            self.values[node] = self.new(node.args[0])
            return
        if node.op != "call_function":
            self.values[node] = self.graph.node_copy(node)
            return
        source = node.args[0] if node.args else None
        results = self.values[source] if isinstance(source, fx.Node) else None
        if isinstance(results, (tuple, list)):
            self.values[node] = self.element(results[node.args[1]], node)  # type: ignore[index]
            return
        trace = self.trace(node)
        self.values[node] = self.inline(node, trace) if trace is not None else self.once(node)

    def new(self, argument: Any) -> Any:
        """An argument of the old graph in the new one."""
        return fx.map_arg(argument, lambda node: self.values[node])

    def element(self, result: Any, getitem: fx.Node) -> Any:
        """One of several results; what is known of it as a result stays known."""
        if isinstance(result, fx.Node) and "rows" not in result.meta:
            result.meta |= {k: getitem.meta[k] for k in ("rows", "placement") if k in getitem.meta}
        return result

    def trace(self, node: fx.Node) -> fx.GraphModule | None:
        """The decomposition of an operator, None if it has none."""
        if node.target not in self._table or is_random(node):
            return None
        key = signature(node)
        if key not in self._traces:
            self._traces[key] = _decomposed(node, self._table)
        return self._traces[key]

    def inline(self, node: fx.Node, trace: fx.GraphModule) -> Any:
        """The operators of a decomposition in the place of one."""
        given = iter(_leaves(node))
        inner: dict[fx.Node, Any] = {}
        for step in trace.graph.nodes:
            if step.op == "placeholder":
                inner[step] = self.values[next(given)]
            elif step.op == "output":
                return self.ends(node, fx.map_arg(step.args[0], inner.__getitem__))
            else:
                arguments = fx.map_arg((step.args, dict(step.kwargs)), inner.__getitem__)
                meta = {key: node.meta[key] for key in KEPT if key in node.meta}
                inner[step] = self.call(step.target, *arguments, meta | {"val": step.meta["val"]})
        return None

    def ends(self, node: fx.Node, result: Any) -> Any:
        """The result of a decomposition; rows are those of the operator, if it has one result."""
        if isinstance(result, fx.Node):
            if "rows" in node.meta and "rows" not in result.meta:
                result.meta["rows"] = node.meta["rows"]
            return result
        return tuple(result)

    def once(self, node: fx.Node) -> fx.Node:
        """An operator as it is, unless an equal one is there already."""
        return self.call(
            node.target, self.new(node.args), self.new(dict(node.kwargs)), dict(node.meta), node
        )

    def call(
        self, target: Any, args: Any, kwargs: Any, meta: dict[str, Any], like: fx.Node | None = None
    ) -> fx.Node:
        key = _key(target, args, kwargs, meta)
        if key is not None and key in self._written:
            return self._written[key]
        node = self.graph.create_node(
            "call_function", target, args, kwargs, name=like.name if like is not None else None
        )
        node.meta = meta
        if key is not None:
            self._written[key] = node
        return node

    def erase_unused(self) -> None:
        """Erase what decompositions compute and nobody reads."""
        for node in reversed(self.graph.nodes):
            pure = isinstance(node.target, OpOverload) and not node.target._schema.is_mutable
            if node.op == "call_function" and not node.users and pure and not is_random(node):
                self.graph.erase_node(node)


def _leaves(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, in the order in which pytree finds them."""
    flat = pytree.tree_leaves((list(node.args), dict(node.kwargs)))
    return [leaf for leaf in flat if isinstance(leaf, fx.Node)]


def _decomposed(node: fx.Node, table: dict[Any, Callable[..., Any]]) -> fx.GraphModule | None:
    """The decomposition at the node's shapes, None if it yields the operator itself."""
    leaves, spec = pytree.tree_flatten((list(node.args), dict(node.kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    target: Any = node.target

    def run(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return target(*args, **kwargs)

    values = [leaves[place].meta["val"] for place in places]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return None
    trace = make_fx(run, decomposition_table=table)(*values)
    nodes = list(trace.graph.nodes)
    known = all(n.op != "get_attr" for n in nodes)
    itself = any(n.target is node.target for n in nodes)
    return trace if known and not itself else None


def _key(target: Any, args: Any, kwargs: Any, meta: dict[str, Any]) -> Any:
    """What equal operators have in common, None for those that may not be merged."""
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return None
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    inputs: list[fx.Node] = []
    fx.map_arg((args, kwargs), inputs.append)
    phase = None if inputs else meta["phase"]  # a constant is cheaper to make than to keep
    try:
        frozen = _frozen((args, kwargs))
        hash(frozen)
    except TypeError:
        return None
    return (target, frozen, phase, repr(meta.get("placement")))


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(value[key])) for key in sorted(value))
    return (type(value), value)
