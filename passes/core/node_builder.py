"""Building blocks of passes: new nodes with their fake values, and where they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar._torch import FakeTensor, FakeTensorMode, fake_result_cache
from autopar.ir.graph import TrainingGraph, tensors
from autopar.ir.roles import InputRole

Target = Callable[..., Any]
aten = torch.ops.aten


def value(argument: Any) -> Any:
    """The fake value behind a node, list of nodes or constant."""
    return fx.map_arg(argument, lambda node: node.meta["val"])


def call(graph: fx.Graph, like: fx.Node, target: Target, *args: Any, **kwargs: Any) -> fx.Node:
    """A new operator at the graph's insertion point; phase, block, source, stage as `like`."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {key: like.meta.get(key) for key in ("phase", "block", "source", "seq_nr", "stage")}
    node.meta["val"] = result_of(target, value(args), value(kwargs))
    return node


def result_of(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of an operator for fake arguments, cached by their kind.

    Torch's own cache of that takes a fraction of a millisecond, which of the operators that passes
    write for a large model makes most of their time.
    """
    modes: list[FakeTensorMode] = []
    key = (target, _key(args, modes), _key(kwargs, modes))
    if not modes:
        return target(*args, **kwargs)
    known = fake_result_cache(modes[0])
    if key not in known:
        known[key] = target(*args, **kwargs)
    return known[key]


def _key(value: Any, modes: list[FakeTensorMode]) -> Any:
    """All that a result depends on; numbers with their type, since 1 equals True and 1.0."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, FakeTensor):
            modes.append(value.fake_mode)
        return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return type(value), *(_key(item, modes) for item in value)
    if isinstance(value, dict):
        return dict, *((name, _key(item, modes)) for name, item in value.items())
    return type(value), value


def add_input(
    graph: TrainingGraph, role: InputRole, name: str, like: torch.Tensor
) -> tuple[TrainingGraph, fx.Node]:
    """`graph` with one more placeholder after the others (there already if it has that role)."""
    if (node := graph.placeholder(role)) is not None:
        return graph, node
    last = graph.placeholders[-1]
    with graph.graph.inserting_after(last):
        node = graph.graph.placeholder(name)
    node.meta = {"val": like, "phase": "forward", "block": "", "source": None, "seq_nr": None}
    return replace(graph, inputs=(*graph.inputs, role)), node


def fake_like(graph: TrainingGraph, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor of the graph's own fake mode, on the device of its first input."""
    device = next(t.device for node in graph.placeholders for t in tensors(node))
    with graph.fake_mode:
        return torch.empty(shape, dtype=dtype, device=device)


def ancestors(nodes: Iterable[fx.Node], within: Set[fx.Node] | None = None) -> set[fx.Node]:
    """All nodes that some nodes depend on, by paths inside `within` if it is given."""
    found, pending = set[fx.Node](), list(nodes)
    while pending:
        new = set(pending.pop().all_input_nodes) - found
        if within is not None:
            new &= within
        found |= new
        pending += new
    return found


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at another's storage."""
    return node.op == "call_function" and (node.target in VIEWS or _aliases(node.target))


def _aliases(target: Target | str) -> bool:
    """Whether the schema says that the result is a view of the first argument."""
    schema = getattr(target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(r.alias_info is not None for r in schema.returns)


VIEWS = frozenset({aten._unsafe_view.default})


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
