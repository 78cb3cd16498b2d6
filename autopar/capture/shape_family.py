"""`ShapeFamily`: captures of one kind of call in many shapes, most of them derived, not traced.

The third shape is traced with symbols for the sizes that differ. If the symbolic graph has the
operators of the captures made so far, and gives their sizes, later calls take the first capture
with other sizes: those that the symbolic graph says, where the call meets its conditions. Any other
call is captured in full.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar._torch import FakeTensorMode
from autopar.capture.call import Call
from autopar.capture.symbolic_sizes import (
    SYMBOLIC,
    Conditions,
    SymbolicSizes,
    evaluated,
    has_order_of,
)
from autopar.capture.trace import Capture
from autopar.capture.values.compiler_branches import Site
from autopar.capture.values.replay import Replay
from autopar.core.ir.graph import TrainingGraph

aten = torch.ops.aten
logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 3
"""Symbolic traces of one kind of call, which take several times as long as a capture."""

CaptureCall = Callable[[Call], Capture]
CaptureSymbolically = Callable[[Call, SymbolicSizes, frozenset[Site]], Capture]


@dataclass
class ShapeFamily:
    """Calls that differ in sizes alone, and the captures of the first few.

    Attributes:
        known: traced calls and their captures, the first one and the last few.
        template: the first capture with sizes to fill in, None if there is none.
        attempts: number of symbolic traces so far.
        traced: number of calls captured in full so far.
    """

    known: list[tuple[Call, Capture]] = field(default_factory=list)
    template: Template | None = None
    attempts: int = 0
    traced: int = 0

    def capture(
        self, call: Call, capture: CaptureCall, capture_symbolically: CaptureSymbolically
    ) -> Capture:
        """The capture of a call: derived if that is proved to be the same, else traced."""
        for known, made in self.known:
            if known.key == call.key:
                return made
        if (derived := self._derived(call)) is not None:
            return derived
        # One capture gives the template. A second one, of other sizes, has to confirm it.
        if len(self.known) > 1 and self.attempts < MOST_ATTEMPTS and self._has_order(call):
            self.attempts += 1
            self._make_template(call, capture_symbolically)
            if (derived := self._derived(call)) is not None:
                return derived
        made, self.traced = capture(call), self.traced + 1
        self.known = [*self.known[:1], *self.known[1:][-1:], (call, made)]
        return made

    def _derived(self, call: Call) -> Capture | None:
        derived = None if self.template is None else self.template.at(call)
        return None if derived is None else replace(derived, is_derived=True)

    def _has_order(self, call: Call) -> bool:
        """Whether the dims of a call lie in memory as those of the first."""
        return has_order_of(call, self.known[0][0])

    def _make_template(self, call: Call, capture_symbolically: CaptureSymbolically) -> None:
        known = [(each, made) for each, made in self.known if self._has_order(each)]
        try:
            sizes = SymbolicSizes([*(each for each, _ in known), call])
            with warnings.catch_warnings(action="ignore"):  # of fx about symbols as arguments
                symbolic = capture_symbolically(known[0][0], sizes, known[0][1].compiled)
            template = Template.of(known[0][1], symbolic, sizes)
            for each, made in known:
                template.check(each, made)
        except Exception as error:  # calls are captured in full then
            logger.debug("no symbolic sizes for a call: %s: %s", type(error).__name__, error)
        else:
            self.template = template


class CapturesDiffer(Exception):
    """A symbolic capture is not that of the plain sizes."""


@dataclass(frozen=True)
class Size:
    """A size that is the value of an expression, by the expression's index."""

    index: int


@dataclass(frozen=True)
class TensorType:
    """Metadata of a tensor; numbers may be a `Size`."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class NodeSizes:
    """Arguments and results of a node that depend on sizes.

    Attributes:
        arguments: args and kwargs with a `Size` for each symbolic number; None if there is none.
        types: a `TensorType` for each tensor among the results, in their structure.
    """

    arguments: tuple[Any, Any] | None
    types: Any


@dataclass(frozen=True)
class Template:
    """A capture with sizes to fill in.

    Attributes:
        base: capture of the first call.
        nodes: sizes of each of its nodes.
        expressions: symbolic expressions of the sizes.
        constants: values that Python read from constants of symbolic sizes.
    """

    base: Capture
    nodes: tuple[NodeSizes, ...]
    expressions: tuple[Any, ...]
    conditions: Conditions
    constants: Replay

    @staticmethod
    def of(base: Capture, symbolic: Capture, sizes: SymbolicSizes) -> Template:
        """The template of a capture and its symbolic counterpart.

        The conditions come last, since comparisons here add some.

        Raises:
            CapturesDiffer: they have other operators or results.
        """
        _check_same_results(base, symbolic)
        pairs, counterpart = _aligned(base.graph.graph, symbolic.graph.graph)
        table: dict[Any, int] = {}

        def number(value: Any) -> Any:
            if not isinstance(value, SYMBOLIC):
                return value
            if not isinstance(value, torch.SymInt):
                raise CapturesDiffer("the model computes with sizes as fractions")
            return Size(table.setdefault(value.node.expr, len(table)))

        nodes = []
        for one, other in pairs:
            args, kwargs = fx.map_arg((other.args, dict(other.kwargs)), counterpart.__getitem__)
            has_sizes = any(isinstance(x, SYMBOLIC) for x in _leaves((args, kwargs)))
            if has_sizes:
                args, kwargs = _mapped((args, kwargs), number)
            elif repr((args, kwargs)) != repr((one.args, dict(one.kwargs))):
                raise CapturesDiffer(f"arguments of {one} differ")
            types = _types(other.meta.get("val"), number)
            nodes.append(NodeSizes((args, kwargs) if has_sizes else None, types))
        return Template(base, tuple(nodes), tuple(table), sizes.conditions(), symbolic.constants)

    def check(self, call: Call, made: Capture) -> None:
        """Raises CapturesDiffer unless a traced capture is the one that the template gives."""
        derived = self.at(call)
        if derived is None:
            raise CapturesDiffer("a known call does not meet the conditions")
        _check_same_results(made, derived)
        for one, other in zip(made.graph.graph.nodes, derived.graph.graph.nodes, strict=True):
            if _described(one) != _described(other):
                raise CapturesDiffer(f"{one} differs")

    def at(self, call: Call) -> Capture | None:
        """The capture of a call of the same kind; None if it does not meet the conditions."""
        binding = self.conditions.binding(call)
        if binding is None:
            return None
        if not self.constants.holds(binding):
            return None
        sizes = evaluated(self.expressions, binding)
        # copy() of a disposable graph returns the graph itself, which further calls still need.
        graph = replace(self.base.graph, disposable=False).copy()
        fill = _Fill(sizes, FakeTensorMode(allow_non_fake_inputs=True))
        copies = list(graph.graph.nodes)
        by_name = {node.name: node for node in copies}
        for node, own in zip(copies, self.nodes, strict=True):
            if own.arguments is not None:
                filled = _mapped(own.arguments, fill.number)
                node.args, node.kwargs = fx.map_arg(filled, lambda n: by_name[n.name])
            if own.types is not None:
                node.meta["val"] = fill.tensors(own.types)
        return replace(self.base, graph=graph, captured_graph=graph)


class _Fill:
    """Numbers for sizes, and fake tensors of filled types."""

    def __init__(self, sizes: Sequence[int], mode: FakeTensorMode) -> None:
        self.sizes, self.mode = sizes, mode
        self.made: dict[TensorType, torch.Tensor] = {}

    def number(self, value: Any) -> Any:
        return self.sizes[value.index] if isinstance(value, Size) else value

    def tensors(self, types: Any) -> Any:
        if isinstance(types, (list, tuple)):
            return type(types)(map(self.tensors, types))
        if not isinstance(types, TensorType):
            return types
        if types not in self.made:
            shape, stride = (tuple(map(self.number, x)) for x in (types.shape, types.stride))
            offset = self.number(types.offset)
            with self.mode:
                made = torch.empty_strided(shape, stride, dtype=types.dtype, device=types.device)
                self.made[types] = made.as_strided(shape, stride, offset) if offset else made
        return self.made[types]


def _aligned(
    ours: fx.Graph, theirs: fx.Graph
) -> tuple[list[tuple[fx.Node, fx.Node]], dict[fx.Node, fx.Node]]:
    """Corresponding nodes of a plain and a symbolic graph, and our node for each of theirs.

    Python takes no slice `x[:]` of a plain size, but one of a symbolic size.

    Raises:
        CapturesDiffer: the graphs have other operators.
    """
    pairs: list[tuple[fx.Node, fx.Node]] = []
    counterpart: dict[fx.Node, fx.Node] = {}
    left = deque(ours.nodes)
    for other in theirs.nodes:
        one = left[0] if left else other
        if _is_whole_slice(other) and not (left and _is_whole_slice(one)):
            counterpart[other] = counterpart[other.all_input_nodes[0]]
            continue
        is_same = one.target == other.target or one.op == "placeholder"
        if not left or one.op != other.op or not is_same:
            raise CapturesDiffer(f"the operators differ at {one} and {other}")
        pairs.append((left.popleft(), other))
        counterpart[other] = one
    if left:
        raise CapturesDiffer(f"the symbolic graph lacks {left[0]}")
    return pairs, counterpart


def _is_whole_slice(node: fx.Node) -> bool:
    """Whether a node is a slice of all elements of a tensor, or the backward of one."""
    if node.target not in (aten.slice.Tensor, aten.slice_backward.default):
        return False
    one, other = (_types(each.meta["val"], _same) for each in (node, node.all_input_nodes[0]))
    return bool(one == other)


def _types(value: Any, number: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_types(item, number) for item in value)
    if not isinstance(value, torch.Tensor):
        return number(value)
    shape, stride = (tuple(map(number, x)) for x in (value.shape, value.stride()))
    return TensorType(shape, stride, number(value.storage_offset()), value.dtype, value.device)


def _described(node: fx.Node) -> object:
    """Everything about a node, with nodes by name."""
    return node.name, repr((node.args, dict(node.kwargs))), _types(node.meta.get("val"), _same)


def _same(value: Any) -> Any:
    return value


def _check_same_results(one: Capture, other: Capture) -> None:
    """Raises CapturesDiffer unless two captures return and depend on the same."""

    def facts(made: Capture) -> list[object]:
        graph = made.graph
        names = tuple(graph.parameters), tuple(graph.constants)
        flags = made.tensor_leaves, made.differentiable, made.structure, made.rebound_buffers
        return [graph.inputs, graph.outputs, names, flags, made.reads, made.classes, made.lifted]

    if one.writes or other.writes or facts(one) != facts(other):
        raise CapturesDiffer("calls return or depend on different things")
    plain = [(type(leaf), repr(leaf)) for leaf in one.leaves]
    if plain != [(type(leaf), repr(leaf)) for leaf in other.leaves]:
        raise CapturesDiffer("calls return different values")
    if not _same_constants(one.graph, other.graph):
        raise CapturesDiffer("constants of the model depend on sizes")


def _same_constants(one: TrainingGraph, other: TrainingGraph) -> bool:
    pairs = ((tensor, other.constants[name]) for name, tensor in one.constants.items())
    return all(
        ours is theirs or (ours.dtype == theirs.dtype and torch.equal(ours, theirs))
        for ours, theirs in pairs
    )


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in _leaves(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in _leaves(item)]
    if isinstance(tree, slice):
        return [tree.start, tree.stop, tree.step]
    return [tree]


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, (list, tuple)):
        kind = list if isinstance(tree, list) else tuple
        return kind(_mapped(item, change) for item in tree)
    if isinstance(tree, dict):
        return {key: _mapped(item, change) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*(_mapped(x, change) for x in (tree.start, tree.stop, tree.step)))
    return change(tree)
