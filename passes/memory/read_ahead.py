"""`read_ahead`: places reads from storage ahead of their readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.passes.core.node_builder import call

AHEAD = 2
"""Bytes in flight at once, as a multiple of those of the largest group."""


@dataclass(frozen=True, eq=False)
class Read:
    """A value to read from storage.

    Attributes:
        node: the value.
        readers: nodes that read it and come after the read, in order.
        nbytes: its size in bytes.
        begin: operator that begins the read into a buffer, and its arguments.
        wait: operator that waits for the buffer, and its arguments after the buffer.
    """

    node: fx.Node
    readers: Sequence[fx.Node]
    nbytes: int
    begin: tuple[Any, ...]
    wait: tuple[Any, ...]


Group = Sequence[Read]
"""Reads with one first reader, begun together."""


def read_ahead(graph: fx.Graph, groups: Sequence[Group], start: fx.Node) -> None:
    """Reads values before their first readers, and begins some groups ahead, after `start`."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    order = sorted(groups, key=lambda group: place[group[0].readers[0]])
    sizes = [sum(read.nbytes for read in group) for group in order]
    window, begun = AHEAD * max(sizes, default=0), 0
    buffers: dict[Read, fx.Node] = {}
    for index, group in enumerate(order):
        at, first = order[index - 1][0].readers[0] if index else start, group[0].readers[0]
        with graph.inserting_before(at):
            while begun < len(order):
                flying = sum(sizes[index:begun])
                if flying and flying + sizes[begun] > window:
                    break
                for read in order[begun]:
                    buffers[read] = call(graph, at, *read.begin)
                    _describe(buffers[read], read.node)
                begun += 1
        for read in group:
            with graph.inserting_before(first):
                back = call(graph, first, read.wait[0], buffers[read], *read.wait[1:])
            _describe(back, read.node)
            for reader in read.readers:
                reader.replace_input_with(read.node, back)


def _describe(node: fx.Node, like: fx.Node) -> None:
    """Gives a copy of a value the meta of the value."""
    kept = ("placement", "batch_dims", "block", "source", "stage")
    node.meta |= {key: like.meta[key] for key in kept if key in like.meta}
