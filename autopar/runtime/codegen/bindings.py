"""`use_bindings`: operators of a graph through torch's Python bindings, which cost less host time.

`torch.ops.aten.mm.default` converts its arguments by the operator's schema. `torch.mm` parses them
in generated code, in half the time. A binding replaces an operator only where both dispatch the
same operators with the same arguments, as a run on fake tensors shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._torch import (
    HOMES_OF_BINDINGS,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    pytree,
)
from autopar.passes.core.node_builder import value


@dataclass(frozen=True)
class Binding:
    """A way to call an operator.

    Attributes:
        target: name of a method of tensors, or a function.
        spreads: whether the list of sizes or dims is given as separate arguments.
    """

    target: str | Callable[..., Any]
    spreads: bool = False

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, *rest = args = self.arguments(args)
        if isinstance(self.target, str):
            return getattr(tensor, self.target)(*rest, **kwargs)
        return self.target(*args, **kwargs)

    def arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0], *args[1]) if self.spreads else args


split_copy = torch.ops.aten.split_with_sizes_copy.default
scaled_mm = torch.ops.aten._scaled_mm.default
_KNOWN: dict[Any, Binding | None] = {}
"""The binding of each operator by the classes of its arguments, None if there is none."""


def use_bindings(graph: fx.Graph) -> None:
    """Replaces operators by bindings, in place."""
    for node in graph.nodes:
        target = node.target
        if target is split_copy and node.meta["val"][0].device.type == "cuda":
            node.target = split_at_once
            continue
        if target is scaled_mm and node.meta["val"].device.type == "cuda":
            node.target = scaled_mm_in_layout
            continue
        if not isinstance(target, OpOverload) or target.namespace != "aten":
            continue
        if not node.args or not isinstance(node.args[0], fx.Node):
            continue  # functions that make tensors also heed `torch.set_default_device`
        key = target, _classes(node.args), _classes(node.kwargs)
        if key not in _KNOWN:
            _KNOWN[key] = _find_binding(target, value(node.args), value(node.kwargs))
        binding = _KNOWN[key]
        if binding is not None:
            node.op = "call_method" if isinstance(binding.target, str) else "call_function"
            node.target, node.args = binding.target, binding.arguments(node.args)


def split_at_once(table: torch.Tensor, sizes: list[int], dim: int) -> list[torch.Tensor]:
    """`torch.split_with_sizes_copy`, for which CUDA has one kernel if it is given the results."""
    shape = table.shape
    out = [table.new_empty((*shape[:dim], size, *shape[dim + 1 :])) for size in sizes]
    torch.split_with_sizes_copy(table, sizes, dim, out=out)
    return out


def scaled_mm_in_layout(a: torch.Tensor, b: torch.Tensor, *rest: Any, **options: Any) -> Any:
    """`aten._scaled_mm` of tensors that were gathered: cuBLAS needs rows of a and columns of b."""
    return scaled_mm(a.contiguous(), b.t().contiguous().t(), *rest, **options)


def _classes(argument: Any) -> Any:
    if isinstance(argument, (tuple, list)):
        return type(argument), *map(_classes, argument)
    if isinstance(argument, dict):
        return tuple((key, _classes(item)) for key, item in argument.items())
    return type(argument)


def _find_binding(target: OpOverload, args: Any, kwargs: Any) -> Binding | None:
    want = _dispatched(target, args, kwargs)
    for binding in _candidates(target, args) if want else ():
        if _dispatched(lambda *a, b=binding, **k: b.call(a, k), args, kwargs) == want:
            return binding
    return None


def _candidates(target: OpOverload, args: tuple[Any, ...]) -> Iterator[Binding]:
    name, first = target._schema.name.partition("::")[2], target._schema.arguments[0]
    if first.name == "self" and hasattr(torch.Tensor, name):
        if len(args) == 2 and isinstance(args[1], (tuple, list)) and args[1]:
            yield Binding(name, spreads=True)
        yield Binding(name)
    for home in HOMES_OF_BINDINGS:
        if hasattr(home, name):
            yield Binding(getattr(home, name))


def _dispatched(function: Callable[..., Any], args: Any, kwargs: Any) -> list[Any] | None:
    """The operators that a function dispatches for fake tensors, None if it raises."""
    given, structure = pytree.tree_flatten((args, kwargs))
    fakes = [x.detach() if isinstance(x, torch.Tensor) else x for x in given]
    modes = [x.fake_mode for x in fakes if isinstance(x, FakeTensor)]
    if not modes:
        return None
    args, kwargs = pytree.tree_unflatten(fakes, structure)
    recorder = _DispatchRecorder(fakes)
    try:
        with torch.no_grad(), modes[0], recorder:
            function(*args, **kwargs)
    except Exception:
        return None
    return recorder.calls


class _DispatchRecorder(TorchDispatchMode):
    """Records operators with their arguments, tensors by the order in which they appear."""

    def __init__(self, given: list[Any]) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self._seen = [x for x in given if isinstance(x, torch.Tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs or {}))
        self.calls.append((func, [self._described(leaf) for leaf in leaves], str(structure)))
        result = func(*args, **(kwargs or {}))
        self._seen += [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        return result

    def _described(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return type(leaf), leaf
        places = [place for place, known in enumerate(self._seen) if known is leaf]
        return places[0] if places else (tuple(leaf.shape), leaf.dtype, leaf.device)
