"""Nodes of a graph that share memory: views, in-place operators and waits."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from autopar._torch import OpOverload
from autopar.core.ir.messages import collective_of, is_storage_wait, is_wait, transfer_of

aten = torch.ops.aten

# Views although their schema does not say so.
_UNSAFE_VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten.unsafe_chunk.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
    }
)
# Views or copies, as the strides allow.
_PERHAPS_VIEWS = frozenset(
    {"reshape", "reshape_as", "contiguous", "flatten", "ravel", "to", "type_as"}
)


@dataclass(frozen=True)
class Storage:
    """A piece of memory: the node that allocates it, its bytes, and the type of its device."""

    creator: fx.Node
    nbytes: int
    device: str


def find_storages(graph: fx.Graph) -> tuple[list[Storage], dict[fx.Node, tuple[int, ...]]]:
    """All storages of a graph, inputs included, and the storages of each node's value.

    A node with several tensors has one storage for each, in order; None has none.
    """
    storages: list[Storage] = []
    behind: dict[fx.Node, tuple[int, ...]] = {}
    for node in graph.nodes:
        shared = _shared(node, behind)
        if shared is None:
            start = len(storages)
            storages += [Storage(node, extent_bytes(t), t.device.type) for t in _vals(node)]
            shared = tuple(range(start, len(storages)))
        behind[node] = shared
    return storages, behind


def is_view(node: fx.Node) -> bool:
    """Whether a node computes nothing: a view, a wait, or an element of a tuple."""
    if node.target is operator.getitem or is_wait(node) or is_storage_wait(node):
        return True
    return _rule(node.target) == "view"


def computes(node: fx.Node) -> bool:
    """Whether a node runs a kernel: it is no view, issues nothing, and waits for nothing."""
    return not is_view(node) and collective_of(node) is None and transfer_of(node) is None


def _shared(node: fx.Node, behind: Mapping[fx.Node, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The storages of other nodes that hold this one's value; None if it has its own."""
    if node.op != "call_function":
        return () if node.op == "output" else None
    if node.target is operator.getitem:
        source, index = node.args
        storages = behind[source] if isinstance(source, fx.Node) else ()
        first = len(_tensors_in(source.meta["val"][:index]))  # type: ignore[union-attr]
        return storages[first : first + len(_vals(node))]
    rule = _rule(node.target)
    waits = is_wait(node) or is_storage_wait(node)
    if waits or rule == "view" or (rule == "perhaps" and _returns_input(node)):
        base = node.args[0]
        storages = behind[base] if isinstance(base, fx.Node) else ()
        return storages * len(_vals(node)) if len(storages) == 1 else storages
    if isinstance(rule, tuple):
        return tuple(s for name in rule for s in _behind_argument(node, name, behind))
    return None


def _behind_argument(
    node: fx.Node, argument: int | str, behind: Mapping[fx.Node, tuple[int, ...]]
) -> Iterator[int]:
    """The storages of the argument at this position or of this name."""
    value = node.kwargs.get(argument) if isinstance(argument, str) else node.args[argument]
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(item, fx.Node):
            yield from behind[item]


@cache
def _rule(target: Any) -> str | tuple[int | str, ...]:
    """The relation of an operator's results to its arguments.

    "fresh", "view" (of the first argument), "perhaps" (a view or a copy), or the positions or names
    of the arguments that are written to and returned.
    """
    if not isinstance(target, OpOverload):
        return "fresh"
    if target in _UNSAFE_VIEWS:
        return "view"
    schema = target._schema
    notes = [r.alias_info for r in schema.returns if r.alias_info is not None]
    if not notes or len(notes) < len(schema.returns):
        return "fresh"
    if not any(note.is_write for note in notes):
        name = target.name().partition("::")[2].partition(".")[0]
        return "perhaps" if name in _PERHAPS_VIEWS else "view"
    return tuple(
        argument.name if argument.kwarg_only else position
        for note in notes
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.before_set == note.before_set
    )


def _returns_input(node: fx.Node) -> bool:
    """Whether reshape, contiguous or to return the memory of their argument."""
    base, result = _vals(node.args[0]), _vals(node)
    if not (len(base) == len(result) == 1):
        return False
    before, after = base[0], result[0]
    if before.dtype != after.dtype or before.device != after.device:
        return False
    if node.kwargs.get("copy") or before.numel() != after.numel():
        return False
    if before.shape == after.shape:
        return before.stride() == after.stride()
    shadow = torch.empty_strided(before.shape, before.stride(), dtype=before.dtype, device="meta")
    try:
        return shadow.view(after.shape).stride() == after.stride()
    except RuntimeError:
        return False


def _vals(node: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a node's value."""
    return _tensors_in(node.meta.get("val") if isinstance(node, fx.Node) else None)


def _tensors_in(val: Any) -> tuple[torch.Tensor, ...]:
    many = val if isinstance(val, (list, tuple)) else (val,)
    return tuple(v for v in many if isinstance(v, torch.Tensor))


def extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element, gaps between strides included."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
