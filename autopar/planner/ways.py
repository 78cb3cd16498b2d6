"""What a placement program chooses from: the ways of every operator, and who reads whose values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from autopar.graph import Buffer, Input, Parameter, TrainingGraph, elements, tensors
from autopar.passes.rules.linear import linear_ways
from autopar.passes.rules.loops import At, Loop, Operator, Way, fitting, replicated, ways
from autopar.passes.rules.table import loops_of
from autopar.placement import Placement, Replicate, Shard


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: one result of a node.

    Attributes:
        node: what makes it.
        place: which of its results.
    """

    node: fx.Node
    place: int = 0

    @property
    def tensor(self) -> torch.Tensor:
        """Its fake tensor."""
        return elements(self.node)[self.place]


@dataclass
class Choices:
    """The ways of the nodes of a graph along an axis of `ranks`.

    Attributes:
        ranks: of the axis.
        ways: of every operator; of a placeholder, the ways in which it may lie.
        reads: the values that each operator reads, in the order of its operands.
        same: nodes that are chosen alike, by node: the first of each set of repeated ones.
    """

    ranks: int
    ways: dict[fx.Node, list[Way]] = field(default_factory=dict)
    reads: dict[fx.Node, list[Value]] = field(default_factory=dict)
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)


def value_of(node: fx.Node) -> Value:
    """The tensor that a node stands for: an element of a tuple belongs to what made the tuple."""
    if node.op == "call_function" and node.target is getitem:
        source, place = node.args
        return Value(source, place)  # type: ignore[arg-type]
    return Value(node)


def choices(graph: TrainingGraph, ranks: int) -> Choices:
    """The ways of a graph: every loop of every operator, interleaved as views ask for.

    Args:
        graph: a captured graph, on whole tensors.
        ranks: of the axis.
    """
    found = Choices(ranks)
    loops: dict[fx.Node, list[Loop]] = {}
    for node in graph.calls():
        if node.target is getitem:
            continue
        found.reads[node] = [value_of(n) for n in _operands(node)]
        loops[node] = loops_of(Operator.of(node)) if _known(node) else []
    shards = _closure(found, loops, ranks)
    for node, own in loops.items():
        if not _known(node):
            found.ways[node] = [_all_whole(found, node)]
            continue
        operator = Operator.of(node)
        shared = ways(own, ranks, sorted(shards[node]))
        found.ways[node] = list(
            dict.fromkeys([replicated(operator), *shared, *linear_ways(operator)])
        )
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        lies: list[Placement] = [Replicate()]
        if isinstance(role, Parameter):
            wanted = (p for u, w in _readers(found, node) for p in w)
            lies += [p for p in dict.fromkeys(wanted) if isinstance(p, Shard)]
        found.ways[node] = [Way((), (p,)) for p in lies]
    found.same = dict(repeated(graph))
    return found


def _known(node: fx.Node) -> bool:
    """Whether every operand is a tensor, as rules expect."""
    return all(isinstance(value_of(n).tensor, torch.Tensor) for n in _operands(node))


def _operands(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, in order and as often as they occur."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, dict(node.kwargs)), found.append)
    return found


def _all_whole(found: Choices, node: fx.Node) -> Way:
    whole = Replicate()
    return Way((whole,) * len(found.reads[node]), (whole,) * max(1, len(tensors(node))))


def _readers(found: Choices, node: fx.Node) -> Iterator[tuple[fx.Node, list[Placement]]]:
    """Who reads a placeholder, and where each would have it."""
    for user, reads in found.reads.items():
        for place, value in enumerate(reads):
            if value.node is node:
                yield user, [way.operands[place] for way in found.ways.get(user, [])]


def _closure(
    found: Choices, loops: dict[fx.Node, list[Loop]], ranks: int
) -> dict[fx.Node, set[int]]:
    """The numbers of pieces that each operator's loops should be tried with.

    An interleaved shard arises at a view and is of use as far as operators hand it on, in both
    directions: the pieces of a node's values are tried on its loops until nothing new comes up.
    """
    met: dict[tuple[Value, int], set[int]] = {}
    pieces: dict[fx.Node, set[int]] = {node: {1} for node in loops}
    before = -1
    while before != (before := _size(pieces) + _size(met)):
        for node in [*loops, *reversed(loops)]:
            for loop in loops[node]:
                for value, at in _places(found, node, loop):
                    counts = met.get((value, at.dim), set())
                    pieces[node] |= {
                        count // at.interleave
                        for count in counts
                        if loop.free
                        and count % at.interleave == 0
                        and loop.size % (count // at.interleave * ranks) == 0
                    }
                for made in fitting(loop, ranks, sorted(pieces[node])):
                    for value, at in _places(found, node, made):
                        met.setdefault((value, at.dim), set()).add(at.interleave)
    return pieces


def _size(table: Mapping[Any, set[int]]) -> int:
    return sum(map(len, table.values()))


def _places(found: Choices, node: fx.Node, loop: Loop) -> Iterator[tuple[Value, At]]:
    """The values that a loop of a node runs over, and where."""
    results = (Value(node, place) for place in range(len(loop.results)))
    for value, at in [
        *zip(found.reads[node], loop.operands, strict=True),
        *zip(results, loop.results, strict=True),
    ]:
        if isinstance(at, At):
            yield value, at


def repeated(graph: TrainingGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each node and the one that stands for it: its like in the first of equal blocks.

    Blocks whose names differ in a number are equal if they hold the same operators at the same
    shapes in the same order.
    """
    blocks: dict[str, list[fx.Node]] = {}
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    for node in graph.graph.nodes:
        role = roles.get(node)
        block = node.meta.get("block") or ""
        if isinstance(role, Parameter):
            block = graph.parameters[role.name].block
        elif isinstance(role, (Buffer, Input)):
            block = ""
        if node.op != "output" and block:
            blocks.setdefault(block, []).append(node)
        elif node.op != "output":
            yield node, node
    first: dict[tuple[str, tuple[str, ...]], list[fx.Node]] = {}
    for name, nodes in blocks.items():
        likeness = (re.sub(r"\d+", "*", name), tuple(map(_likeness, nodes)))
        yield from zip(nodes, first.setdefault(likeness, nodes), strict=True)


def _likeness(node: fx.Node) -> str:
    shapes = [(tuple(t.shape), t.stride(), t.dtype) for t in tensors(node)]
    return f"{node.op} {node.target if node.op == 'call_function' else ''} {shapes}"
