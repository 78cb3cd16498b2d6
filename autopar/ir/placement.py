"""Placements: how one tensor lies over the ranks of one mesh axis.

A placement is a type. Along an axis of n ranks a tensor is `Replicate` (every rank holds the
whole), `Shard(dim)` (rank r holds the r-th chunk of `dim`), `Partial(op)` (the true value is
the reduction over ranks) or `Varying` (each rank holds a value of its own: rows of the batch
and all that is computed from them).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """Rank r holds the r-th of n chunks of `dim`.

    In one piece, `dim` may be uneven: chunks are then as torch.chunk and DTensor cut them.

    Attributes:
        dim: the dimension that is cut.
        interleave: cut `dim` into this many equal pieces first and shard each of them (the
            layout of a fused QKV weight sharded by heads has interleave 3).
    """

    dim: int
    interleave: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.interleave == 1 else f"S({self.dim}, x{self.interleave})"


@dataclass(frozen=True)
class Partial:
    """The true value is the reduction `op` ("sum" or "max") over the ranks."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


@dataclass(frozen=True)
class Varying:
    """Each rank holds its own value: rows of the batch, or something computed from them."""

    def __str__(self) -> str:
        return "V"


Placement = Replicate | Shard | Partial | Varying


def placement_of(text: str) -> Placement:
    """The placement that prints as `text`.

    Raises:
        ValueError: none does.

    >>> placement_of("S(0, x3)")
    Shard(dim=0, interleave=3)
    """
    kind, *options = re.findall(r"\w+", text)
    match kind, options:
        case "R", []:
            return Replicate()
        case "V", []:
            return Varying()
        case "S", [dim]:
            return Shard(int(dim))
        case "S", [dim, pieces]:
            return Shard(int(dim), int(pieces[1:]))
        case "P", [op]:
            return Partial(op)
    raise ValueError(f"{text!r} is no placement")


class UnevenRanks(int):
    """A number of ranks that hold unequal numbers of rows of the batch.

    Every dim that is sharded over them is a multiple of the rows, and is cut as these are.

    Attributes:
        rows: of the batch, cut by `even_rows`.

    >>> chunk_of(14, UnevenRanks(3, rows=7), 1)
    (6, 4)
    """

    rows: int

    def __new__(cls, ranks: int, rows: int) -> UnevenRanks:
        made = super().__new__(cls, ranks)
        made.rows = rows
        return made

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        return int(self), self.rows


def can_cut(size: int, parts: int, interleave: int = 1) -> bool:
    """Whether a dim of `size` can lie in shards: in equal ones, or in one piece with none empty.

    >>> [can_cut(5, parts) for parts in (2, 3, 4, 5)]
    [True, True, False, True]
    """
    evenly = size % (parts * interleave) == 0
    return evenly or (interleave == 1 and chunk_of(size, parts, parts - 1)[1] > 0)


def chunk_of(rows: int, parts: int, part: int) -> tuple[int, int]:
    """The first row and the number of rows of one chunk of `chunk_rows`.

    >>> chunk_of(10, 4, 3)
    (9, 1)
    """
    if isinstance(parts, UnevenRanks):
        held, each = even_rows(parts.rows, parts), rows // parts.rows
        return sum(held[:part]) * each, held[part] * each
    step = -(-rows // parts)
    begin = min(step * part, rows)
    return begin, min(step, rows - begin)


def chunk_rows(rows: int, parts: int) -> tuple[int, ...]:
    """Sizes of the `parts` chunks of a dimension of `rows`, as torch.chunk and DTensor cut it.

    >>> chunk_rows(10, 4)
    (3, 3, 3, 1)
    """
    return tuple(chunk_of(rows, parts, part)[1] for part in range(parts))


def even_rows(rows: int, parts: int) -> tuple[int, ...]:
    """Sizes of the `parts` pieces of a batch of `rows`, as even as they can be.

    >>> even_rows(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(rows // parts + (part < rows % parts) for part in range(parts))
