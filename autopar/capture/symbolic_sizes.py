"""`SymbolicSizes`: sizes of a call as symbols, and the conditions that a trace sets on them.

A dim is a symbol if known calls differ in it; dims that agree in every call share one. A trace with
symbols notes each comparison that Python or an operator makes. Under the same answers, any sizes
give the same operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from autopar._torch import ShapeEnv
from autopar.capture.call import Call, TensorSpec
from autopar.core.ir.graph import dense_strides
from autopar.errors import CaptureError

Place = tuple[int, int]
"""A leaf of a call and a dim of it."""

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def kind_of(call: Call) -> tuple[Any, ...]:
    """Everything about a call but its sizes and strides."""
    leaves = tuple(
        (len(x.shape), x.dtype, x.device, x.requires_grad, x.values)
        if isinstance(x, TensorSpec)
        else (type(x), repr(x))
        for x in call.leaves
    )
    return leaves, call.structure, call.derivatives, call.answers


def sizes_of(call: Call) -> dict[Place, int]:
    """The size of every dim of a call."""
    specs = ((index, call.leaves[index]) for index in call.tensor_indices)
    return {(i, dim): size for i, spec in specs for dim, size in enumerate(spec.shape)}


@dataclass(frozen=True)
class Conditions:
    """Requirements of a trace on sizes.

    Attributes:
        places: dims of each symbol; their sizes are to be equal.
        fixed: dims that are no symbols, with their sizes.
        strides: strides of each tensor of the traced call, for the order of dims in memory.
        ranges: least and largest size of each symbol.
        guards: conditions as symbolic expressions.
    """

    places: Mapping[Any, tuple[Place, ...]]
    fixed: Mapping[Place, int]
    strides: Mapping[int, tuple[int, ...]]
    ranges: Mapping[Any, tuple[Any, Any]]
    guards: tuple[Any, ...]

    def binding(self, call: Call) -> dict[Any, int] | None:
        """The size of each symbol in a call of the same kind; None if a condition is not met."""
        sizes = sizes_of(call)
        if any(sizes[place] != size for place, size in self.fixed.items()):
            return None
        if not all(_is_dense(call.leaves[i], like) for i, like in self.strides.items()):
            return None
        binding = {}
        for symbol, places in self.places.items():
            size, *others = (sizes[place] for place in places)
            least, most = self.ranges[symbol]
            if any(other != size for other in others) or not least <= size <= most:
                return None
            binding[symbol] = size
        met = all(_is_true(_substituted(guard, binding)) for guard in self.guards)
        return binding if met else None


class SymbolicSizes:
    """Symbols for the dims in which calls differ; `fake` makes inputs of the first call."""

    def __init__(self, calls: Sequence[Call]) -> None:
        from autopar._torch_dynamo import new_size_symbol

        first = calls[0]
        self._strides = {i: first.leaves[i].stride for i in first.tensor_indices}
        if not all(has_order_of(call, first) for call in calls):
            raise CaptureError("inputs are not dense")
        self.env = ShapeEnv()
        every = [sizes_of(call) for call in calls]
        groups: dict[tuple[int, ...], list[Place]] = {}
        for place in every[0]:
            groups.setdefault(tuple(sizes[place] for sizes in every), []).append(place)
        self._symbols: dict[Place, torch.SymInt] = {}
        self._places: dict[Any, tuple[Place, ...]] = {}
        self._fixed: dict[Place, int] = {}
        for seen, places in groups.items():
            if len(set(seen)) == 1:
                self._fixed |= dict.fromkeys(places, seen[0])
                continue
            if min(seen) < 2:
                raise CaptureError("sizes 0 and 1 have operators of their own")
            size = new_size_symbol(self.env, seen[0], f"size{len(self._places)}")
            self._symbols |= dict.fromkeys(places, size)
            self._places[size.node.expr] = tuple(places)

    def fake(self, index: int, spec: TensorSpec) -> torch.Tensor:
        """A new tensor for a leaf of the first call, inside the fake mode."""
        shape: list[Any] = [
            self._symbols.get((index, dim), size) for dim, size in enumerate(spec.shape)
        ]
        stride = dense_strides(shape, self._strides[index])
        made = torch.empty_strided(shape, stride, dtype=spec.dtype, device=spec.device)
        return made.requires_grad_(spec.requires_grad)

    def conditions(self) -> Conditions:
        """Requirements of the traces so far.

        Raises:
            CaptureError: they require fixed sizes.
        """
        env = self.env
        if any(symbol in env.replacements for symbol in self._places):
            raise CaptureError("the model depends on fixed sizes")
        ranges = {s: (env.var_to_range[s].lower, env.var_to_range[s].upper) for s in self._places}
        guards = tuple(dict.fromkeys(guard.expr for guard in env.guards))
        known = set(self._places)
        if env.deferred_runtime_asserts or any(guard.free_symbols - known for guard in guards):
            raise CaptureError("the model depends on sizes that are not those of its inputs")
        return Conditions(self._places, self._fixed, self._strides, ranges, guards)


def inline_sizes(graph: fx.Graph) -> None:
    """Writes symbolic sizes into the arguments that read them, in place of operators on sizes."""
    for node in graph.nodes:
        if any(isinstance(source.meta.get("val"), SYMBOLIC) for source in node.all_input_nodes):
            node.args, node.kwargs = fx.map_arg((node.args, dict(node.kwargs)), _size_or_node)
    for node in reversed(graph.nodes):
        if isinstance(node.meta.get("val"), SYMBOLIC) and node.op == "call_function":
            graph.erase_node(node)


def evaluated(expressions: Iterable[Any], binding: Mapping[Any, int]) -> list[int]:
    """The values of expressions over symbols."""
    return [int(_substituted(expression, binding)) for expression in expressions]


def _size_or_node(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value if isinstance(value, SYMBOLIC) else node


def has_order_of(call: Call, first: Call) -> bool:
    """Whether the tensors of a call are dense, with the order of dims in memory of another's."""
    return all(_is_dense(call.leaves[i], first.leaves[i].stride) for i in first.tensor_indices)


def _is_dense(spec: TensorSpec, like: tuple[int, ...] | None) -> bool:
    """Whether a tensor is dense, with the order of dims in memory of the strides `like`."""
    return like is not None and spec.stride == dense_strides(spec.shape, like)


def _substituted(expression: Any, sizes: Mapping[Any, int]) -> Any:
    """A symbolic expression with numbers for its symbols."""
    return expression.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})


def _is_true(condition: Any) -> bool:
    """Whether a condition without symbols holds."""
    return condition in (sympy.true, True)
