"""Helpers for passes: create nodes with fake values and query existing ones."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    fake_result_cache,
    pytree,
)
from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.placement import Placement, Varying
from autopar.core.ir.roles import InputRole, OutputRole

Target = Callable[..., Any]
aten = torch.ops.aten
_VARYING = Varying()


def value(argument: Any) -> Any:
    """Replaces nodes in an argument by their fake values."""
    return fx.map_arg(argument, lambda node: node.meta["val"])


def call(graph: fx.Graph, like: fx.Node, target: Target, *args: Any, **kwargs: Any) -> fx.Node:
    """Writes an operator at the insertion point, with phase, block, source and stage of `like`."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {**meta_like(like), "val": result_of(target, value(args), value(kwargs))}
    return node


def meta_like(node: fx.Node) -> dict[str, Any]:
    """Meta that new nodes take from a node: phase, block, source and stage."""
    return {key: node.meta.get(key) for key in ("phase", "block", "source", "seq_nr", "stage")}


def result_of(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Result of an operator on fake arguments, cached by the arguments' metadata.

    PyTorch's own cache takes a fraction of a millisecond each, most of a pass over a large model.
    """
    if target is operator.getitem:
        return args[0][args[1]]
    modes: list[FakeTensorMode] = []
    key = (target, _key(args, modes), _key(kwargs, modes))
    if not modes:
        return target(*args, **kwargs)
    known = fake_result_cache(modes[0])
    if key not in known:
        known[key] = target(*args, **kwargs)
    return known[key]


def _key(value: Any, modes: list[FakeTensorMode]) -> Any:
    """Cache key of an argument; includes types, since 1, 1.0 and True are equal."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, FakeTensor):
            modes.append(value.fake_mode)
        bits = value.is_conj(), value.is_neg()  # the conjugate of a conjugate is plain again
        layout = tuple(value.shape), value.stride(), value.storage_offset()
        return *layout, value.dtype, value.device, bits
    if isinstance(value, (list, tuple)):
        return type(value), *(_key(item, modes) for item in value)
    if isinstance(value, dict):
        return dict, *((name, _key(item, modes)) for name, item in value.items())
    return type(value), value


def add_input(
    graph: TrainingGraph, role: InputRole, name: str, like: torch.Tensor
) -> tuple[TrainingGraph, fx.Node]:
    """Appends a placeholder for `role`, or returns the existing one."""
    if (node := graph.placeholder(role)) is not None:
        return graph, node
    last = graph.placeholders[-1]
    with graph.graph.inserting_after(last):
        node = graph.graph.placeholder(name)
    node.meta = {"val": like, "phase": "forward", "block": "", "source": None, "seq_nr": None}
    return replace(graph, inputs=(*graph.inputs, role)), node


def extract(
    graph: TrainingGraph,
    inputs: Mapping[fx.Node, InputRole],
    body: Iterable[fx.Node],
    outputs: Mapping[OutputRole, fx.Node | None],
) -> TrainingGraph:
    """The graph of the operators `body`, with an input for each node of `inputs`."""
    new = fx.Graph()
    copies = copy_nodes(new, inputs, body)
    new.output([copies[n] if n is not None else None for n in outputs.values()])
    return replace(graph, graph=new, inputs=tuple(inputs.values()), outputs=tuple(outputs))


def copy_nodes(
    new: fx.Graph, inputs: Iterable[fx.Node], body: Iterable[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Writes a placeholder for each input and a copy of each operator; returns all by original."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = new.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in body:
        copies[node] = new.node_copy(node, copies.__getitem__)
    return copies


def fake_like(graph: TrainingGraph, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Fake tensor in the graph's fake mode, on the device of its first input."""
    device = next(t.device for node in graph.placeholders for t in tensors(node))
    with graph.fake_mode:
        return torch.empty(shape, dtype=dtype, device=device)


def dense_like(graph: TrainingGraph, fake: torch.Tensor) -> torch.Tensor:
    """Fake tensor without gaps or repeats, its dims in the same order, as messages arrive."""
    with graph.fake_mode:
        dims = dims_by_stride(fake)
        return torch.empty_permuted(fake.shape, dims, dtype=fake.dtype, device=fake.device)


def dims_by_stride(tensor: torch.Tensor) -> list[int]:
    """The dims of a tensor, outermost in memory first."""
    strides = tensor.stride()
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def ancestors(nodes: Iterable[fx.Node], within: Set[fx.Node] | None = None) -> set[fx.Node]:
    """Transitive inputs of `nodes`, along paths inside `within` if given."""
    found, pending = set[fx.Node](), list(nodes)
    while pending:
        new = set(pending.pop().all_input_nodes) - found
        if within is not None:
            new &= within
        found |= new
        pending += new
    return found


def recompute(
    graph: fx.Graph,
    readers: Iterable[fx.Node],
    again: Callable[[fx.Node], bool],
    **meta: object,
) -> Set[fx.Node]:
    """Runs the nodes of which `again` is true a second time, before their first reader.

    Args:
        graph: graph to change in place.
        readers: backward operators in graph order, which read the clones instead.
        again: whether a node is recomputed.
        meta: metadata of the clones, which have phase "backward".

    Returns:
        The recomputed nodes.
    """
    clones: dict[fx.Node, fx.Node] = {}
    for reader in readers:
        for node in filter(again, reader.all_input_nodes):
            pending = [node]
            while pending:
                current = pending[-1]
                missing = [n for n in current.all_input_nodes if again(n) and n not in clones]
                pending += missing
                if missing:
                    continue
                pending.pop()
                if current not in clones:
                    with graph.inserting_before(reader):
                        clones[current] = graph.node_copy(current, lambda n: clones.get(n, n))
                    clones[current].meta = {**current.meta, "phase": "backward", **meta}
            reader.replace_input_with(node, clones[node])
    return clones.keys()


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view of another."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or schema.is_mutable:
        return False
    aliases = any(result.alias_info is not None for result in schema.returns)
    # `_unsafe_view` shares memory, too, but its schema declares no alias.
    return aliases or node.target is aten._unsafe_view.default


def storage_owner(node: fx.Node) -> fx.Node:
    """The node that allocated the memory of a value."""
    while is_view(node) or is_view(sequence_of(node)) or _is_mutable(node):
        node = node.all_input_nodes[0]
    return node


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def sequence_of(node: fx.Node) -> fx.Node:
    """The node whose result an item is taken from; any other node itself."""
    is_item = node.op == "call_function" and node.target is operator.getitem
    return node.all_input_nodes[0] if is_item else node


def viewed(value: torch.Tensor, source: fx.Node, chain: Sequence[fx.Node]) -> torch.Tensor:
    """The last view of a chain that begins at a source, whose fake value is given."""
    values: dict[fx.Node, torch.Tensor] = {source: value}
    for node in chain:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[chain[-1] if chain else source]


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return node.op == "call_function" and draws_random(node.target, node.args, node.kwargs)


def draws_random(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else argument.default_value
            return bool(kwargs.get("dropout_p", given))
    return True


def inline(
    graph: fx.Graph,
    like: fx.Node,
    function: Callable[..., Any],
    *arguments: Any,
    placement: Placement | None = _VARYING,
) -> Any:
    """Writes the operators that a function of tensors runs at the insertion point.

    Arguments and results have nodes for tensors. New nodes take phase, block, source and stage of
    `like`, and `placement` along the data axis, unless it is None.
    """
    leaves, structure = pytree.tree_flatten(arguments)
    given = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    own = {node: node.meta["val"].detach() for node in given}  # ids differ if nodes share a value
    meta = meta_like(like) | ({} if placement is None else {"placement": placement})
    writer = _Writer(graph, meta, own)
    fakes = [own[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    with given[0].meta["val"].fake_mode, writer:
        results = function(*pytree.tree_unflatten(fakes, structure))
    return pytree.tree_map(writer.node, results)


class _Writer(TorchDispatchMode):
    """Writes a node for every operator that runs."""

    def __init__(self, graph: fx.Graph, meta: dict[str, Any], given: dict[fx.Node, Any]) -> None:
        super().__init__()
        self.graph, self.meta = graph, meta
        self.nodes = {id(value): node for node, value in given.items()}
        self.alive: list[Any] = [*given.values()]  # a freed tensor's id could be reused

    def node(self, value: Any) -> Any:
        """Node of a tensor; other values unchanged."""
        return self.nodes[id(value)] if isinstance(value, torch.Tensor) else value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, (torch.Tensor, tuple, list)):
            return result
        self.alive.append(result)
        node = self.graph.call_function(func, *pytree.tree_map(self.node, (args, kwargs or {})))
        node.meta = {**self.meta, "val": result}
        self.nodes[id(result)] = node
        for place, part in enumerate([] if isinstance(result, torch.Tensor) else result):
            self.nodes[id(part)] = self.graph.call_function(operator.getitem, (node, place))
            self.nodes[id(part)].meta = {**self.meta, "val": part}
        return result
