"""`undo_sorts`: rows that are sorted, computed on row by row, and put back, stay where they are.

Mixtures of experts sort tokens by expert, so that each expert reads consecutive rows. The sort
couples all rows of a batch, though every row is computed by itself. `autopar::expert_mm` needs no
order, so the order may be any: it is replaced by the rows' own.

The replacement is proven, operator by operator. Relative to the permutation of a sort, a value is
in sorted order along a dim, numbers the rows' places, or does not depend on the order at all. The
loops of an operator say what it makes of these: a loop over a dim computes each of its iterations
alike and by itself. Every result of the graph must turn out not to depend on the order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.core.ir.graph import TrainingGraph, Value, elements
from autopar.core.operators.checked import checked
from autopar.passes.core.collective_ops import value_of
from autopar.passes.core.node_builder import call, is_view
from autopar.passes.rules.loops import DimAccess, Loop, Operator, fills_dims, overloads
from autopar.passes.rules.registry import is_supported, loops_of

aten = torch.ops.aten


@dataclass(frozen=True)
class InOrder:
    """A value whose iterations along `dim` lie in sorted order."""

    dim: int


@dataclass(frozen=True)
class Places:
    """The place before the sort of each row in order, divided by `each`, along dim 0."""

    each: int = 1


@dataclass(frozen=True)
class Inverse:
    """The place in order of each row."""


Fact = InOrder | Places | Inverse
Rewrite = Callable[[fx.Graph, fx.Node], fx.Node]

ZEROS = overloads("zeros new_zeros zeros_like")
ONES = overloads("ones new_ones ones_like")
FULL = overloads("full new_full full_like")
EMPTY = overloads("new_empty empty_like")
SORTS = (aten.sort.default, aten.sort.stable)


class _Unproven(Exception):
    """An operator may depend on the order of rows."""


def undo_sorts(graph: TrainingGraph) -> None:
    """Replaces sorts on whose order no result depends, in place."""
    changed = False
    for node in list(graph.graph.nodes):
        if node.target in SORTS and _is_rows(node):
            changed |= _undo(graph, node)
    if changed:
        graph.graph.eliminate_dead_code()


def _is_rows(node: fx.Node) -> bool:
    """Whether a sort is of one dim, and of whole numbers, in ascending order."""
    given, made = Operator.of(node).operands[0], Operator.of(node)
    integral = not given.dtype.is_floating_point and not given.dtype.is_complex
    return given.dim() == 1 and integral and not made.argument("descending")


def _undo(graph: TrainingGraph, sort: fx.Node) -> bool:
    proof = _Proof(sort)
    try:
        for node in graph.graph.nodes:
            if node.op == "call_function":
                proof.follow(node)
        if any(node is not None and value_of(node) in proof.facts for node in graph.results):
            return False
    except _Unproven:
        return False
    for node, rewrite in proof.rewrites.items():
        with graph.graph.inserting_before(node):
            made = rewrite(graph.graph, node)
        node.replace_all_uses_with(made)
    return True


@dataclass
class _Proof:
    """Facts about values relative to the order of one sort, and what replaces its nodes."""

    sort: fx.Node
    facts: dict[Value, Fact] = field(default_factory=dict)
    rewrites: dict[fx.Node, Rewrite] = field(default_factory=dict)

    @property
    def source(self) -> fx.Node:
        """The numbers that are sorted."""
        (source,) = self.sort.all_input_nodes
        return source

    @property
    def rows(self) -> int:
        """The number of rows that are sorted."""
        return int(self.source.meta["val"].shape[0])

    def fact(self, argument: Any) -> Fact | None:
        """The fact about a node; None if it does not depend on the order."""
        return self.facts.get(value_of(argument)) if isinstance(argument, fx.Node) else None

    def follow(self, node: fx.Node) -> None:
        """Derives what holds for the results of an operator."""
        if node is self.sort:
            self.facts |= {Value(node, 0): InOrder(0), Value(node, 1): Places()}
        elif node.target is operator.getitem:
            if node.args[0] is self.sort:
                self.rewrites[node] = self._source_of if node.args[1] == 0 else _own_places
        elif node.target is aten.searchsorted.Tensor and self._finds_groups(node):
            self.facts[Value(node)] = InOrder(0)
            self.rewrites[node] = self._source_of
        elif any(self.fact(each) is not None for each in node.all_input_nodes):
            special = _SPECIAL.get(node.target)
            if special is None or not special(self, node):
                self._by_loops(node)

    def _source_of(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        dtype = node.meta["val"].dtype
        if dtype == self.source.meta["val"].dtype:
            return self.source
        return call(graph, node, aten._to_copy.default, self.source, dtype=dtype)

    def _by_loops(self, node: fx.Node) -> None:
        """Follows the one loop that runs over the rows of every operand in order."""
        made = Operator.of(node)
        if not is_supported(node.target):
            raise _Unproven
        operands = _operand_nodes(node)
        loops = (loop for loop in loops_of(made) if self._fits(loop, made, operands))
        found = next(loops, None)
        if found is None:
            raise _Unproven
        for index, at in enumerate(found.results):
            if isinstance(at, DimAccess):
                self.facts[Value(node, index)] = InOrder(at.dim)

    def _fits(self, loop: Loop, made: Operator, operands: list[fx.Node]) -> bool:
        """Whether a loop runs over exactly the dims in order, and computes its rows alike."""
        facts = [self.fact(node) for node in operands]
        if loop.lowering or loop.size != self.rows or not loop.interleavable:
            return False
        if any(isinstance(fact, (Places, Inverse)) for fact in facts):
            return False
        wanted = (DimAccess(fact.dim) if isinstance(fact, InOrder) else None for fact in facts)
        return fills_dims(loop, made) and all(
            want == at or (want is None and _is_constant(node))
            for want, at, node in zip(wanted, loop.operands, operands, strict=True)
        )

    # Groups of rows.

    def _finds_groups(self, node: fx.Node) -> bool:
        """Whether a search finds the group of every row in order, from the groups' ends.

        The ends are running sums of the numbers of rows in each group.
        """
        ends, places = node.args[:2]
        if not node.kwargs.get("right") or not _is_arange(places, self.rows):
            return False
        sums = _without_casts(ends)
        if sums.target is not aten.cumsum.default or sums.meta["val"].dim() != 1:
            return False
        return self._counts_groups(_without_casts(sums.args[0]))

    def _counts_groups(self, counts: Any) -> bool:
        """Whether a node counts the sorted numbers from 0 below their groups.

        A number that is no group would be counted nowhere: its row is multiplied by no expert.
        """
        if counts.target is aten.histc.default:
            numbers, bins, low, high = counts.args
            return low == 0 and high == bins - 1 and bins > 1 and self._are_sorted(numbers)
        if counts.target is aten.scatter_add.default:  # as `bincount` is captured
            into, dim, numbers, ones = counts.args
            return (
                dim == 0 and _is_full(into, 0) and _is_full(ones, 1) and self._are_sorted(numbers)
            )
        return False

    def _are_sorted(self, numbers: Any) -> bool:
        """Whether these are the numbers that are sorted, in any order."""
        first = _without_casts(numbers)
        return first is _without_casts(self.source) or (
            first.target is operator.getitem and first.args == (self.sort, 0)
        )


# -- operators that read or make places --------------------------------------------------------


def _divide(proof: _Proof, node: fx.Node) -> bool:
    """The places of rows in a table with one row for each `by` of them."""
    places, by = proof.fact(node.args[0]), node.args[1]
    rounds = node.target is not aten.div.Tensor_mode or node.kwargs.get("rounding_mode") == "floor"
    if places != Places() or not isinstance(by, int) or by < 1 or proof.rows % by or not rounds:
        return False
    proof.facts[Value(node)] = Places(by)
    return True


def _reshape(proof: _Proof, node: fx.Node) -> bool:
    """Places that are repeated along further dims."""
    places, shape = proof.fact(node.args[0]), node.meta["val"].shape
    if not isinstance(places, Places) or shape[:1] != (proof.rows,):
        return False
    columns = node.args[0].meta["val"].shape[1:]  # type: ignore[union-attr]
    if columns.numel() != 1 and node.target is not aten.expand.default:
        return False
    proof.facts[Value(node)] = places
    return True


def _index(proof: _Proof, node: fx.Node) -> bool:
    source, indices = node.args
    if not isinstance(indices, (list, tuple)) or len(indices) != 1:
        return False
    return _take(proof, node, source, indices[0])


def _index_select(proof: _Proof, node: fx.Node) -> bool:
    source, dim, index = node.args
    return _is_first(dim) and _take(proof, node, source, index)


def _gather(proof: _Proof, node: fx.Node) -> bool:
    source, dim, index = node.args
    alike = _columns(source) == _columns(index)
    return _is_first(dim) and alike and _take(proof, node, source, index)


def _take(proof: _Proof, node: fx.Node, source: Any, index: Any) -> bool:
    """Rows brought into order, or out of it."""
    match proof.fact(index):
        case Places(each) if proof.fact(source) is None:
            if source.meta["val"].shape[0] * each != proof.rows:
                return False
            proof.facts[Value(node)] = InOrder(0)
            proof.rewrites[node] = lambda graph, like: _repeated(graph, like, source, each)
            return True
        case Inverse() if proof.fact(source) == InOrder(0):
            proof.rewrites[node] = lambda graph, like: source
            return True
    return False


def _index_put(proof: _Proof, node: fx.Node) -> bool:
    target, indices, values, *adds = node.args
    if not isinstance(indices, (list, tuple)) or len(indices) != 1:
        return False
    return _put(proof, node, target, indices[0], values, bool(adds and adds[0]))


def _scatter(proof: _Proof, node: fx.Node) -> bool:
    target, dim, index, values = node.args
    if not _is_first(dim) or not isinstance(values, fx.Node):
        return False
    if not _columns(index) == _columns(values) == _columns(target):
        return False
    return _put(proof, node, target, index, values, node.target is aten.scatter_add.default)


def _index_add(proof: _Proof, node: fx.Node) -> bool:
    target, dim, index, values = node.args
    return _is_first(dim) and not node.kwargs and _put(proof, node, target, index, values, True)


def _put(proof: _Proof, node: fx.Node, target: Any, index: Any, values: Any, adds: bool) -> bool:
    """Rows put back to their places, or summands brought into order."""
    shape = target.meta["val"].shape
    match proof.fact(index), proof.fact(values):
        case Places(1), None if not adds:
            if shape != (proof.rows,) or not _is_arange(values, proof.rows):
                return False
            proof.facts[Value(node)] = Inverse()
            return True
        case Places(each), InOrder(0) if adds and proof.fact(target) is None:
            if shape[0] * each != proof.rows or values.meta["val"].shape[1:] != shape[1:]:
                return False
            proof.rewrites[node] = lambda graph, like: _summed(graph, like, target, values, each)
            return True
        case Places(1), InOrder(0) if not adds:
            if values.meta["val"].shape != shape:
                return False
            proof.rewrites[node] = lambda graph, like: values
            return True
        case Inverse(), None if adds and _is_full(target, 0):
            if values.meta["val"].shape != shape:
                return False
            proof.facts[Value(node)] = InOrder(0)
            proof.rewrites[node] = lambda graph, like: values
            return True
    return False


def _sort_places(proof: _Proof, node: fx.Node) -> bool:
    """The sort of a permutation, which finds its inverse."""
    if proof.fact(node.args[0]) != Places() or Operator.of(node).argument("descending"):
        return False
    proof.facts[Value(node, 1)] = Inverse()
    return True


def _created(proof: _Proof, node: fx.Node) -> bool:
    """A tensor of one number, of which the operand gives only the shape and dtype."""
    return True


_SPECIAL: dict[Any, Callable[[_Proof, fx.Node], bool]] = {
    aten.floor_divide.default: _divide,
    aten.div.Tensor_mode: _divide,
    **dict.fromkeys(
        (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default),
        _reshape,
    ),
    aten.unsqueeze.default: _reshape,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.index_put.default: _index_put,
    aten.scatter.src: _scatter,
    aten.scatter_add.default: _scatter,
    aten.index_add.default: _index_add,
    **dict.fromkeys(SORTS, _sort_places),
    **dict.fromkeys((*ZEROS, *ONES, *FULL, *EMPTY), _created),
}


# -- nodes -------------------------------------------------------------------------------------


def _is_first(dim: Any) -> bool:
    """Whether a dim is the first, counted from the front."""
    return isinstance(dim, int) and dim == 0


def _columns(node: Any) -> torch.Size:
    """The sizes of all dims but the first."""
    shape: torch.Size = node.meta["val"].shape
    return shape[1:]


def _operand_nodes(node: fx.Node) -> list[fx.Node]:
    """The tensors among the arguments of a node, in the order of `Operator.operands`."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda each: found.append(each))
    return found


def _without_casts(node: Any) -> Any:
    """The node that casts, checks and views read; order and number of elements are kept."""
    while node.target in (aten._to_copy.default, checked) or is_view(node):
        source = node.all_input_nodes[0]
        if source.meta["val"].numel() != node.meta["val"].numel():
            break
        if node.target in (aten.t.default, aten.transpose.int, aten.permute.default):
            break
        node = source
    return node


def _is_arange(node: Any, count: int) -> bool:
    """Whether a node is 0, 1, ... below `count`."""
    made = _without_casts(node)
    given: dict[Any, Any] = {
        aten.arange.default: [(count,)],
        aten.arange.start: [(0, count)],
        aten.arange.start_step: [(0, count), (0, count, 1)],
    }
    return tuple(made.args) in given.get(made.target, ())


def _is_full(node: Any, number: int) -> bool:
    """Whether a node is full of a number."""
    if node.target in (aten.full.default, aten.full_like.default, aten.new_full.default):
        return bool(node.args[2 if node.target is aten.new_full.default else 1] == number)
    return node.target in (ZEROS if number == 0 else ONES)


def _is_constant(node: Any) -> bool:
    """Whether a node is full of one number, in whatever order."""
    return node.target in (*ZEROS, *ONES, *FULL)


def _own_places(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = node.meta["val"]
    return _in_mode(graph, node, aten.arange.default, made.shape[0], device=made.device)


def _in_mode(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **options: Any) -> fx.Node:
    """Writes an operator that has no tensors among its arguments."""
    with elements(like)[0].fake_mode:
        return call(graph, like, target, *args, **options)


def _repeated(graph: fx.Graph, like: fx.Node, source: fx.Node, each: int) -> fx.Node:
    """Every row of a table `each` times, one after another."""
    if each == 1:
        return source
    count, *columns = source.meta["val"].shape
    wide = call(graph, like, aten.unsqueeze.default, source, 1)
    wide = call(graph, like, aten.expand.default, wide, [count, each, *columns])
    wide = call(graph, like, aten.clone.default, wide, memory_format=torch.contiguous_format)
    return call(graph, like, aten.view.default, wide, [count * each, *columns])


def _summed(graph: fx.Graph, like: fx.Node, target: fx.Node, values: fx.Node, each: int) -> fx.Node:
    """The target, and the sum of every `each` rows of the values."""
    total = values
    if each > 1:
        count, *columns = values.meta["val"].shape
        rows = call(graph, like, aten.reshape.default, values, [count // each, each, *columns])
        total = call(graph, like, aten.sum.dim_IntList, rows, [1])
    if _is_full(target, 0):
        return total
    return call(graph, like, aten.add.Tensor, target, total)
