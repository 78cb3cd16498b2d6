"""`Rows`: where the rows of a loss lie in a value. `rows_through`: how an operator carries them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from autopar.passes.core.node_builder import aten
from autopar.passes.rules.loops import Access, DimAccess, Loop, Operator
from autopar.passes.rules.registry import rule_of


@dataclass(frozen=True)
class Rows:
    """The rows `first` to `end` of a loss, along a dim of a value.

    A row may be several elements of the dim, one behind the other.

    Attributes:
        pieces: equal pieces of the dim, each of which holds all these rows.
    """

    dim: int
    pieces: int
    first: int
    end: int

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.end - self.first

    def of_chunk(self, begin: int, end: int) -> Rows:
        """Those of the rows that are in a chunk of all rows."""
        first = min(max(begin, self.first), self.end)
        return replace(self, first=first, end=max(first, min(end, self.end)))

    def unit(self, shape: Sequence[int]) -> int:
        """Elements of the dim that one row of one piece has, in a value of a shape."""
        return shape[self.dim] // (self.pieces * self.count)

    def shape(self, whole: Sequence[int], part: Rows) -> list[int]:
        """The shape of a part of a value with these rows."""
        shape = list(whole)
        shape[self.dim] = self.pieces * part.count * self.unit(whole)
        return shape


Carried = Rows | Literal["sum", "lost"] | None
"""What a value has of the rows: their places, a sum over them, a result that no chunk has."""


@dataclass(frozen=True)
class Carriage:
    """The rows of each operand and each result of an operator; None for a whole one."""

    operands: tuple[Rows | None, ...]
    results: tuple[Carried, ...]


def rows_through(
    operator: Operator, operands: Sequence[Rows | None], result: Rows | None = None
) -> Carriage | None:
    """Rows of an operator's values, from those of some operands or of its first result.

    None if no loop of the operator runs over the rows, or if it combines them other than by a sum.
    """
    if (moved := _moved_rows(operator, operands)) is not None:
        return moved
    rule = rule_of(operator.target)
    for loop in [] if rule is None else rule(operator):
        if (carriage := _by_loop(loop, operands, result)) is not None:
            return carriage
    return None


def _by_loop(loop: Loop, operands: Sequence[Rows | None], result: Rows | None) -> Carriage | None:
    given = [*zip(operands, loop.operands, strict=False)]
    given += [] if result is None else [(result, loop.results[0])]
    known = [(rows, access) for rows, access in given if rows is not None]
    first = known[0][0]
    inner = _inner_pieces(*known[0])
    if inner is None or loop.even_only or (inner > 1 and not loop.interleavable):
        return None
    same = all(_inner_pieces(*each) == inner for each in known)
    span = (first.first, first.end)
    if not same or any((rows.first, rows.end) != span for rows, _ in known):
        return None
    if loop.size % (inner * first.count) or "sum" in loop.operands:
        return None

    def rows_at(access: Access) -> Rows | None:
        if not isinstance(access, DimAccess):
            return None
        return Rows(access.dim, access.interleave * inner, *span)

    def carried(access: Access) -> Carried:
        return access if access == "sum" else rows_at(access) or "lost"

    return Carriage(tuple(map(rows_at, loop.operands)), tuple(map(carried, loop.results)))


def _inner_pieces(rows: Rows, access: Access) -> int | None:
    """Pieces of a loop's access that hold the rows; None if the loop does not run over them."""
    if not isinstance(access, DimAccess) or access.dim != rows.dim:
        return None
    return None if rows.pieces % access.interleave else rows.pieces // access.interleave


def _moved_rows(operator: Operator, operands: Sequence[Rows | None]) -> Carriage | None:
    """Rows of a slice of rows, and of its backward, which puts them between zeros."""
    target = operator.target
    if target not in (aten.slice.Tensor, aten.slice_backward.default) or operands[0] is None:
        return None
    rows, shape = operands[0], operator.operands[0].shape
    dim, start, step = (operator.argument(name) for name in ("dim", "start", "step"))
    count = operator.results[0].shape[rows.dim]
    along = dim % len(shape) == rows.dim and step == 1
    if not along or rows.pieces > 1 or rows.unit(shape) != 1:
        return None
    longer = count if target is aten.slice_backward.default else shape[rows.dim]
    start = min(max((start or 0) + (longer if (start or 0) < 0 else 0), 0), longer)
    first = rows.first + (start if target is aten.slice.Tensor else -start)
    return Carriage((rows,), (replace(rows, first=first, end=first + count),))


def sliced_arguments(operator: Operator, rows: Rows, part: Rows, result: Rows) -> tuple[Any, ...]:
    """Arguments of a slice of rows, or of its backward, between a chunk's rows.

    Args:
        operator: the operator on whole tensors.
        rows: rows of the result.
        part: rows of the operand that are in the chunk.
        result: rows of the result that are in the chunk.
    """
    dim = rows.dim
    if operator.target is aten.slice.Tensor:
        start = result.first - part.first
        return (dim, start, start + result.count, 1)
    start = part.first - result.first
    shape = rows.shape(operator.results[0].shape, result)
    return (shape, dim, start, start + part.count, 1)


def candidates(
    product: torch.Tensor, shapes: Sequence[Sequence[int]], chunks: int
) -> Iterator[Rows]:
    """Rows of a product that may be divided, the best first.

    All of its rows come first, which costs no copies. Views may have taken them apart into dims;
    then either the rows of the first, or those of the last inside of each row of the others.

    Args:
        product: the result of a product.
        shapes: shapes that its value is viewed in.
        chunks: number of chunks.
    """
    count = product.shape[-2]
    dim = product.dim() - 2
    yield Rows(dim, 1, 0, count)
    for shape in shapes:
        outer, inner = shape[0], shape[-2]
        options = [Rows(dim, 1, 0, outer), Rows(dim, count // inner, 0, inner)]
        yield from options if outer % chunks == 0 else options[::-1]
