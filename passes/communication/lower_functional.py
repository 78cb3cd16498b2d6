"""`Rewriter`: replaces an abstract collective; `Lowering`: by a functional one and views."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import fx

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.placement import Placement, Varying
from autopar.passes.core.collective_ops import (
    axis_of,
    is_uneven,
    kind_of,
    op_of,
    replace_collective,
    wait_of,
)
from autopar.passes.core.node_builder import aten, call, is_view

c10d = torch.ops._c10d_functional
# An all-reduce in place must not overwrite a buffer that one of these still sends.
READ_UNTIL_WAITED = (
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default,
)
Begun = tuple[list[fx.Node], Callable[..., Iterable[fx.Node]]]
"""Issued functional collectives, and the function that writes the results of awaited ones."""


class Rewriter:
    """Writes the operators that replace one collective, in a method named after its kind."""

    def __init__(self, graph: TrainingGraph, start: fx.Node) -> None:
        self.graph, self.start, self.like = graph.graph, start, start
        self.axis = axis_of(start)
        self.ranks = graph.axes[self.axis]
        self.operands: list[fx.Node] = list(start.args[0])  # type: ignore[arg-type]
        self.placement: Placement | None = self.operands[0].meta.get("placement")

    def begin(self) -> Any:
        """Writes the operators at the place of the start."""
        self.graph.inserting_before(self.start)
        return getattr(self, kind_of(self.start))()

    def replace(self, results: Iterable[fx.Node]) -> None:
        """Replaces the collective by results, without the padding at the end of their dim 0."""
        new = []
        for node, fake in zip(results, tensors(self.start), strict=True):
            padded = tensors(node)[0].shape != fake.shape
            new.append(self.op(aten.slice.Tensor, node, 0, 0, fake.shape[0]) if padded else node)
        replace_collective(self.graph, self.start, new)

    def chunk_sizes(self, rows: Iterable[int]) -> list[int]:
        """Rows of the padded chunk of each tensor with `rows` rows."""
        return [-(-n // self.ranks) for n in rows]

    def op(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = call(self.graph, self.like, target, *args, **kwargs)
        node.meta["placement"] = self.placement
        return node

    def flat(self, node: fx.Node) -> fx.Node:
        return self.op(aten.view.default, self.contiguous(node), [-1])

    def contiguous(self, node: fx.Node) -> fx.Node:
        if tensors(node)[0].is_contiguous():
            return node
        return self.op(aten.clone.default, node, memory_format=torch.contiguous_format)

    def pad(self, node: fx.Node, rows: int) -> fx.Node:
        fake = tensors(node)[0]
        missing = rows - fake.shape[0]
        if not missing:
            return node
        return self.op(aten.constant_pad_nd.default, node, [0, 0] * (fake.dim() - 1) + [0, missing])

    def joined(self, pieces: list[fx.Node], *dim: int) -> fx.Node:
        return pieces[0] if len(pieces) == 1 else self.op(aten.cat.default, pieces, *dim)


class Lowering(Rewriter):
    """Lowers one collective."""

    def __init__(self, graph: TrainingGraph, start: fx.Node, rank: int) -> None:
        super().__init__(graph, start)
        self.rank = rank
        dtype = tensors(start)[0].dtype
        # Not every backend carries float8, but all carry bytes.
        self.as_bytes = dtype if dtype.is_floating_point and dtype.itemsize == 1 else None

    def begin(self) -> Any:
        """Writes the operators at the place of the start; float8 travels as bytes."""
        self.graph.inserting_before(self.start)
        if self.as_bytes is not None:
            self.operands = [self.op(aten.view.dtype, x, torch.uint8) for x in self.operands]
        return super().begin()

    def run(self) -> None:
        done = wait_of(self.start)
        issued, finish = self.begin()
        self.graph.inserting_before(done)
        self.like, self.placement = done, Varying()  # results keep their placements
        results = finish(*[self.op(c10d.wait_tensor.default, pending) for pending in issued])
        if self.as_bytes is not None:
            results = [self.op(aten.view.dtype, x, self.as_bytes) for x in results]
        self.replace(results)

    def op(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().op(target, *args, **kwargs)
        node.meta["of"] = self.start.name
        return node

    # Kinds of collectives.

    def all_reduce(self) -> Begun:
        how = op_of(self.start)
        if len(self.operands) == 1:
            operand = self.contiguous(self.operands[0])
            # `all_reduce` copies its operand first; `all_reduce_` needs no second buffer.
            target = c10d.all_reduce_ if self.owns(operand) else c10d.all_reduce
            return [self.op(target.default, operand, how, self.axis)], lambda done: [done]
        flat = self.op(aten.cat.default, [self.flat(n) for n in self.operands])
        issued = self.op(c10d.all_reduce_.default, flat, how, self.axis)
        shapes = [list(tensors(n)[0].shape) for n in self.operands]
        return [issued], lambda done: self.cut(done, shapes)

    def all_gather(self) -> Begun:
        padded = self.padded_chunks()
        shapes = [list(tensors(n)[0].shape) for n in padded]
        single = len(padded) == 1
        sent = padded[0] if single else self.op(aten.cat.default, [self.flat(n) for n in padded])
        issued = self.op(c10d.all_gather_into_tensor.default, sent, self.ranks, self.axis)

        wholes = [[self.ranks * n, *rest] for n, *rest in shapes]
        return [issued], lambda done: [done] if single else self.columns(done, wholes)

    def reduce_scatter(self) -> Begun:
        padded, shapes = self.padded_wholes()
        # `reduce_scatter_tensor` cuts its input by rank, so row r holds chunk r of every operand.
        tables = [
            self.op(aten.view.default, x, [self.ranks, prod(shape)])
            for x, shape in zip(padded, shapes, strict=True)
        ]
        sent = self.joined(tables, 1)
        issued = self.op(c10d.reduce_scatter_tensor.default, sent, "sum", self.ranks, self.axis)
        return [issued], lambda done: self.cut(self.op(aten.view.default, done, [-1]), shapes)

    def all_to_all(self) -> Begun:
        """Packs the tensors into a table with one row for each rank."""
        if is_uneven(self.start):
            return self.exchange_rows()
        shapes = [list(tensors(x)[0].shape) for x in self.operands]
        tables = [
            self.op(aten.view.default, self.contiguous(x), [self.ranks, -1]) for x in self.operands
        ]
        sent, splits = self.joined(tables, 1), [1] * self.ranks
        issued = self.op(c10d.all_to_all_single.default, sent, splits, splits, self.axis)
        return [issued], lambda done: self.columns(done, shapes)

    def exchange_rows(self) -> Begun:
        """Sends every rank as many rows as the start says."""
        (rows,) = self.operands
        splits = self.start.args[2:4]
        issued = self.op(c10d.all_to_all_single.default, self.contiguous(rows), *splits, self.axis)
        return [issued], lambda done: [done]

    def permute(self) -> Begun:
        """Sends all tensors to one rank and receives those of one, by an uneven all-to-all."""
        shapes = [list(tensors(x)[0].shape) for x in self.operands]
        issued = self.send(self.joined([self.flat(x) for x in self.operands]))
        return [issued], lambda done: self.cut(done, shapes)

    # Pieces.

    def send(self, flat: fx.Node) -> fx.Node:
        """Sends a flat tensor to this rank's target of a permutation."""
        targets: list[int] = list(self.start.args[1])  # type: ignore[arg-type]
        size = tensors(flat)[0].numel()
        received, sent = (
            [size if rank == peer else 0 for rank in range(self.ranks)]
            for peer in (targets.index(self.rank), targets[self.rank])
        )
        return self.op(c10d.all_to_all_single.default, flat, received, sent, self.axis)

    def columns(self, table: fx.Node, shapes: list[list[int]]) -> list[fx.Node]:
        """Unpacks tensors from adjacent columns of a table with one row for each rank."""
        if len(shapes) == 1:
            return [self.op(aten.view.default, table, shapes[0])]
        table = self.op(aten.view.default, table, [self.ranks, -1])
        widths = [prod(shape) // self.ranks for shape in shapes]
        # One kernel on CUDA copies all columns; slices would need a copy for each tensor.
        pieces = self.op(aten.split_with_sizes_copy.default, table, widths, 1)
        return [
            self.op(aten.view.default, self.op(operator.getitem, pieces, i), shape)
            for i, shape in enumerate(shapes)
        ]

    def padded_chunks(self) -> list[fx.Node]:
        """The chunks of a gather, padded to equal size on all ranks."""
        sizes = self.chunk_sizes(self.start.args[1])  # type: ignore[arg-type]
        return [self.pad(x, size) for x, size in zip(self.operands, sizes, strict=True)]

    def padded_wholes(self) -> tuple[list[fx.Node], list[list[int]]]:
        """The operands, contiguous and padded to equal chunks, and the shape of a chunk of each."""
        sizes = self.chunk_sizes(tensors(x)[0].shape[0] for x in self.operands)
        padded = [
            self.contiguous(self.pad(x, self.ranks * size))
            for x, size in zip(self.operands, sizes, strict=True)
        ]
        shapes = [[size, *tensors(x)[0].shape[1:]] for x, size in zip(padded, sizes, strict=True)]
        return padded, shapes

    def cut(self, flat: fx.Node, shapes: list[list[int]]) -> list[fx.Node]:
        if len(shapes) == 1:
            return [self.op(aten.view.default, flat, shapes[0])]
        pieces = self.op(aten.split_with_sizes.default, flat, [prod(s) for s in shapes])
        return [
            self.op(aten.view.default, self.op(operator.getitem, pieces, i), shape)
            for i, shape in enumerate(shapes)
        ]

    def owns(self, node: fx.Node) -> bool:
        """Whether the graph computes a buffer and reads it only before this collective."""
        while is_view(node):
            node = node.all_input_nodes[0]
        if node.op != "call_function" or node.target is operator.getitem:
            return False
        family = [node]
        for member in family:
            for user in member.users:
                late = user is not self.start and not user < self.start
                if late or user.target in READ_UNTIL_WAITED:
                    return False
                if is_view(user) and user not in family:
                    family.append(user)
        return True
