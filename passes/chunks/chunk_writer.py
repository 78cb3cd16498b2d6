"""`write_chunks`: a region of a graph, written once for each chunk of its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.core.ir.graph import TrainingGraph, operands, tensors
from autopar.passes.chunks.early_gradients import EarlyGradients
from autopar.passes.chunks.row_search import Region
from autopar.passes.chunks.rows import Rows, sliced_arguments
from autopar.passes.core.collective_ops import is_name
from autopar.passes.core.node_builder import aten, call, is_view, result_of, value
from autopar.passes.rules.emit_redistribute import can_view
from autopar.passes.rules.local_args import SIZE_ARGUMENTS, SQUEEZES
from autopar.passes.rules.loops import Operator

VIEWS = (aten.view.default, aten._unsafe_view.default)
SLICES = (aten.slice.Tensor, aten.slice_backward.default)


def write_chunks(graph: TrainingGraph, region: Region, chunks: int) -> None:
    """Replaces a region in place by a copy of it for each chunk.

    The backward computes wide values of the forward once more; of each chunk they are in memory
    only while it runs.
    """
    bounds = _bounds(region, chunks)
    joined: dict[fx.Node, fx.Node] = {}
    again = _computed_again(region)
    for nodes in (region.forward, region.backward):
        writer = _Writer(graph.graph, region, nodes[0], joined)
        prefix = again if nodes is region.backward else ()
        wanted = _read_outside(region, nodes, again)
        with _inserting_behind(graph.graph, nodes):
            joined |= writer.write([*prefix, *nodes], bounds, wanted)
    _replace(graph.graph, region, joined)


def write_chunks_early(
    graph: TrainingGraph, region: Region, chunks: int, early: EarlyGradients
) -> None:
    """Replaces a region in place by chunks of the forward that compute its gradients, too.

    The backward multiplies these by the number that scales them.
    """
    both = (*region.forward, *region.backward)
    wanted = _read_outside(region, both, ())
    writer = _Writer(graph.graph, region, region.forward[0], {})
    with _inserting_behind(graph.graph, region.forward):
        writer.joined[early.scale] = writer.one(early.scale)
        for node in early.inputs:
            writer.joined[node] = writer.copied(node)
        joined = writer.write(both, _bounds(region, chunks), wanted)
    with _inserting_behind(graph.graph, region.backward):
        for node in filter(early.scaled.__contains__, wanted):
            joined[node] = call(graph.graph, node, aten.mul.Tensor, joined[node], early.scale)
    _replace(graph.graph, region, joined)
    for node in reversed(early.inputs):
        if not node.users:
            graph.graph.erase_node(node)


@contextlib.contextmanager
def _inserting_behind(graph: fx.Graph, nodes: Sequence[fx.Node]) -> Iterator[None]:
    """Inserts behind nodes; what reads them in between moves behind what is inserted."""
    end = nodes[-1].next
    moved = list(_readers_between(nodes, end))
    with graph.inserting_before(end):
        yield
    for node in moved:
        end.prepend(node)


def _bounds(region: Region, chunks: int) -> list[tuple[int, int]]:
    """The first row of each chunk, and the row behind its last."""
    step = -(-region.rows // chunks)
    return [(at, min(at + step, region.rows)) for at in range(0, region.rows, step)]


def _replace(graph: fx.Graph, region: Region, joined: Mapping[fx.Node, fx.Node]) -> None:
    """Lets the readers of a region read joined values, and erases it."""
    own = {*region.forward, *region.backward}
    for node, whole in joined.items():
        node.replace_all_uses_with(whole, lambda user: user not in own)
    for node in (*reversed(region.backward), *reversed(region.forward)):
        graph.erase_node(node)


def _computed_again(region: Region) -> list[fx.Node]:
    """Operators of the forward whose wide values the backward reads."""
    own, found = set(region.forward), set[fx.Node]()
    pending = [x for node in region.backward for x in node.all_input_nodes]
    while pending:
        node = pending.pop()
        names_tuple = not isinstance(node.meta["val"], torch.Tensor)
        if node in own and node not in found and (node in region.wide or names_tuple):
            found.add(node)
            pending += node.all_input_nodes
    return [node for node in region.forward if node in found]


def _read_outside(
    region: Region, nodes: Sequence[fx.Node], again: Iterable[fx.Node]
) -> list[fx.Node]:
    """Narrow values that others read, or the backward's copies of operators."""
    own = set(nodes).difference(again)
    return [
        node
        for node in nodes
        if region.carried[node] is not None
        and node not in region.wide
        and any(user not in own for user in node.users)
    ]


def _readers_between(nodes: Sequence[fx.Node], end: fx.Node) -> Iterator[fx.Node]:
    """Nodes between those of a region that depend on it, in order."""
    after, node = set(nodes), nodes[0]
    while (node := node.next) is not end:
        if node not in after and any(x in after for x in node.all_input_nodes):
            after.add(node)
            yield node


class _Writer:
    """Writes the chunks of one half.

    Attributes:
        joined: whole values of the other half, and what stands for values of the backward.
    """

    def __init__(
        self, graph: fx.Graph, region: Region, like: fx.Node, joined: dict[fx.Node, fx.Node]
    ) -> None:
        self.graph, self.region, self.joined = graph, region, joined
        self.phase = like.meta["phase"]
        self.meta = {key: like.meta.get(key) for key in ("block", "source", "stage", "seq_nr")}

    def write(
        self,
        nodes: Sequence[fx.Node],
        bounds: Iterable[tuple[int, int]],
        wanted: Sequence[fx.Node],
    ) -> dict[fx.Node, fx.Node]:
        """Writes nodes for each chunk; the whole of each wanted value."""
        parts: dict[fx.Node, list[fx.Node]] = {node: [] for node in wanted}
        totals: dict[fx.Node, fx.Node] = {}
        for begin, end in bounds:
            local = self.chunk(nodes, begin, end)
            for node in wanted:
                if self.region.carried[node] == "sum":
                    totals[node] = self.added(node, totals.get(node), local[node])
                else:
                    parts[node].append(local[node])
        return {
            node: self.narrowed(node, totals[node])
            if node in totals
            else self.concatenated(node, parts[node])
            for node in wanted
        }

    # One chunk.

    def chunk(self, nodes: Sequence[fx.Node], begin: int, end: int) -> dict[fx.Node, fx.Node]:
        """Writes the operators on one chunk; the local value of each."""
        local: dict[fx.Node, fx.Node] = {}
        pieces: dict[tuple[fx.Node, Rows, bool], fx.Node] = {}
        for node in nodes:
            if is_name(node):
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), local.__getitem__)
                local[node] = self.call(node, node.target, *args, **kwargs)
                continue
            given = []
            carriage = self.region.carriages[node]
            for place, operand in enumerate(operands(node)):
                rows = carriage.operands[place] if place < len(carriage.operands) else None
                if operand in local:
                    given.append(local[operand])
                elif rows is None:
                    given.append(self.joined.get(operand, operand))
                else:
                    key = operand, rows, is_view(node)
                    if key not in pieces:
                        pieces[key] = self.piece(operand, rows, rows.of_chunk(begin, end), key[-1])
                    given.append(pieces[key])
            local[node] = self.operator(node, given, begin, end)
        return local

    def operator(self, node: fx.Node, given: list[fx.Node], begin: int, end: int) -> fx.Node:
        """Writes an operator on one chunk of its operands."""
        operator, carriage = Operator.of(node), self.region.carriages[node]
        local, target = operator.with_operands(given), operator.target
        args, result = list(local.args), carriage.results[0]
        if isinstance(result, Rows):
            part = result.of_chunk(begin, end)
            shape = result.shape(operator.results[0].shape, part)
            read = carriage.operands[0] if carriage.operands else None
            if (
                target in SLICES
                and read is not None
                and operator.argument("dim") % len(shape) == (result.dim)
            ):
                own = read.of_chunk(begin, end)
                sliced = sliced_arguments(operator, result, own, part)
                return self.call(node, target, args[0], *sliced)
            if target in SQUEEZES:
                return self.call(node, aten.view.default, args[0], shape)
            if (place := SIZE_ARGUMENTS.get(target)) is not None:
                args[place] = shape
            if target in VIEWS and not can_view(tensors(args[0])[0], shape):
                args[0] = self.contiguous(args[0])
        return self.call(node, target, *args, **local.kwargs)

    def piece(self, operand: fx.Node, rows: Rows, part: Rows, is_viewed: bool) -> fx.Node:
        """The part of a whole value with a chunk's rows."""
        whole = self.joined.get(operand, operand)
        shape = list(tensors(whole)[0].shape)
        dim, unit, first = rows.dim, rows.unit(shape), part.first - rows.first
        local = rows.shape(shape, part)
        if rows.pieces > 1:
            apart = [*shape[:dim], rows.pieces, rows.count * unit, *shape[dim + 1 :]]
            whole, dim = self.viewed(whole, apart), dim + 1
        bounds = dim, first * unit, (first + part.count) * unit
        node = self.call(operand, aten.slice.Tensor, whole, *bounds)
        if rows.pieces > 1 or (is_viewed and not tensors(node)[0].is_contiguous()):
            node = self.viewed(self.contiguous(node), local)
        return node

    # All chunks.

    def concatenated(self, node: fx.Node, parts: list[fx.Node]) -> fx.Node:
        """The whole of a value from its chunks."""
        rows, shape = self.region.carried[node], list(tensors(node)[0].shape)
        assert isinstance(rows, Rows)
        if len(parts) == 1:
            return parts[0]
        if rows.pieces == 1:
            return self.call(node, aten.cat.default, parts, rows.dim)
        dim, apart = rows.dim, []
        for part in parts:
            own = list(tensors(part)[0].shape)
            split = [*own[:dim], rows.pieces, own[dim] // rows.pieces, *own[dim + 1 :]]
            apart.append(self.viewed(part, split))
        return self.viewed(self.call(node, aten.cat.default, apart, dim + 1), shape)

    def added(self, node: fx.Node, total: fx.Node | None, part: fx.Node) -> fx.Node:
        """The sum of a total and a chunk's part, of narrow numbers in float32."""
        dtype = tensors(node)[0].dtype
        if total is None:
            is_narrow = dtype.is_floating_point and dtype.itemsize < 4
            cast = {"dtype": torch.float32}
            return self.call(node, aten._to_copy.default, part, **cast) if is_narrow else part
        in_place = node.meta["phase"] == "backward"
        return self.call(node, aten.add_.Tensor if in_place else aten.add.Tensor, total, part)

    def narrowed(self, node: fx.Node, total: fx.Node) -> fx.Node:
        """A total in the dtype of the whole value."""
        dtype = tensors(node)[0].dtype
        if tensors(total)[0].dtype == dtype:
            return total
        return self.call(node, aten._to_copy.default, total, dtype=dtype)

    # Nodes.

    def call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Writes an operator with the meta of the value that it is a chunk of."""
        node = self.graph.call_function(target, args, kwargs)
        is_again = self.phase == "backward" and like.meta["phase"] == "forward"
        again = {"recomputed": True} if is_again else {}
        found = result_of(target, value(args), value(kwargs))
        own = {} if like in self.region.carried else self.meta
        node.meta = {**like.meta, **own, **again, "phase": self.phase, "val": found}
        return node

    def one(self, like: fx.Node) -> fx.Node:
        """The number 1 in place of a gradient without dims."""
        fake = tensors(like)[0]
        options = {"dtype": fake.dtype, "device": fake.device, "pin_memory": False}
        return self.call(like, aten.full.default, [], 1, **options)

    def copied(self, node: fx.Node) -> fx.Node:
        """A node outside of the region, on what stands for its operands."""
        copy = self.graph.node_copy(node, lambda x: self.joined.get(x, x))
        copy.meta = {**node.meta, "phase": self.phase}
        return copy

    def viewed(self, node: fx.Node, shape: list[int]) -> fx.Node:
        """A value in another shape, copied if its strides do not allow a view."""
        if not can_view(tensors(node)[0], shape):
            node = self.contiguous(node)
        return self.call(node, aten.view.default, node, shape)

    def contiguous(self, node: fx.Node) -> fx.Node:
        """A contiguous copy of a value."""
        return self.call(node, aten.clone.default, node, memory_format=torch.contiguous_format)
