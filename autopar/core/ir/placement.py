"""Placements of a tensor along one mesh axis, and chunks of its dims."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.core.common.documents import Text


class Placement(Text):
    """Part of a tensor that each rank holds along one mesh axis."""

    @classmethod
    def of(cls, text: str) -> Placement:
        """The placement that prints as `text`.

        Raises:
            ValueError: No placement prints so.

        >>> Placement.of("S(0, x3)")
        Shard(dim=0, interleave=3)
        """
        kind, _, options = text.removesuffix(")").partition("(")
        match kind, options.split(", ") if options else []:
            case "R", []:
                return Replicate()
            case "V", []:
                return Varying()
            case "S", [dim] if dim.isdecimal():
                return Shard(int(dim))
            case "S", [dim, pieces] if dim.isdecimal() and pieces[1:].isdecimal():
                return Shard(int(dim), int(pieces[1:]))
            case "E", ["0"]:
                return Routed()
            case "E", ["0", pieces] if pieces[1:].isdecimal():
                return Routed(0, int(pieces[1:]))
            case "P", ["sum" | "max" as op]:
                return Partial(op)
        raise ValueError(f"{text!r} is no placement")


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard(Placement):
    """Rank r holds the r-th chunk of `dim`.

    Chunks may be uneven if `interleave` is 1: their sizes are those of torch.chunk and DTensor.

    Attributes:
        dim: sharded dimension.
        interleave: number of equal pieces of `dim` that are sharded separately; 3 for a fused QKV
            weight sharded by heads.
    """

    dim: int
    interleave: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.interleave == 1 else f"S({self.dim}, x{self.interleave})"


@dataclass(frozen=True)
class Routed(Shard):
    """Rank r holds the rows, along dim 0, of the experts that it holds.

    How many these are is known only in a step; sizes in a graph are those of even shares. Rows come
    from `Shard(0, interleave)`: in order of the rank that held them, then of their place there.
    """

    dim: int = 0

    def __str__(self) -> str:
        return super().__str__().replace("S", "E")


@dataclass(frozen=True)
class AxisShard:
    """A tensor divided over the ranks of an axis, of which each has its shard.

    Attributes:
        size: size of the sharded dim before the division.
    """

    axis: str
    shard: Shard
    size: int


@dataclass(frozen=True)
class Partial(Placement):
    """The tensor is the reduction `op` ("sum" or "max") of the ranks' values."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


@dataclass(frozen=True)
class Varying(Placement):
    """Each rank holds a different value: its rows of the batch, or a result computed from them."""

    def __str__(self) -> str:
        return "V"


@dataclass(frozen=True)
class OpStrategy(Text):
    """Placements of one operator along an axis.

    Attributes:
        operands: required placement of each tensor argument.
        results: placement of each result.
        lowering: name in `CUSTOM_LOWERINGS`, or "" to run the operator on local shards.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    lowering: str = ""

    @classmethod
    def of(cls, text: str) -> OpStrategy:
        """The strategy that prints as `text`.

        Raises:
            ValueError: No strategy prints so.
        """
        places, _, lowering = text.partition(" by ")
        operands, results = (
            tuple(map(Placement.of, re.split(r", (?=[A-Z])", side) if side else ()))
            for side in places.split(" -> ")
        )
        return OpStrategy(operands, results, lowering)

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.operands))} -> {', '.join(map(str, self.results))}"
        return f"{text} by {self.lowering}" if self.lowering else text


class UnevenRanks(int):
    """Number of ranks that hold different numbers of rows of the batch.

    Every dim sharded over these ranks is a multiple of `rows`, and is divided in proportion.

    Attributes:
        rows: number of rows of the batch.
        held: rows of each rank; () for those of `even_rows`.

    >>> chunk_of(14, UnevenRanks(3, rows=7), 1)
    (6, 4)
    """

    rows: int
    held: tuple[int, ...]

    def __new__(cls, ranks: int, rows: int, held: tuple[int, ...] = ()) -> UnevenRanks:
        made = super().__new__(cls, ranks)
        made.rows, made.held = rows, held
        return made

    def part(self, rank: int) -> tuple[int, int]:
        """First row and number of rows of a rank."""
        if self.held:
            return sum(self.held[:rank]), self.held[rank]
        return even_part(self.rows, int(self), rank)

    # Copies and pickles pass these to __new__. The default of int is the number alone.
    def __getnewargs__(self) -> tuple[int, int, tuple[int, ...]]:  # type: ignore[override]
        return int(self), self.rows, self.held


def can_cut(size: int, parts: int, interleave: int = 1) -> bool:
    """Whether a dim can be sharded: into equal chunks, or uneven but nonempty ones of one piece.

    >>> [can_cut(5, parts) for parts in (2, 3, 4, 5)]
    [True, True, False, True]
    """
    evenly = size % (parts * interleave) == 0
    return evenly or (interleave == 1 and chunk_of(size, parts, parts - 1)[1] > 0)


def chunk_of(rows: int, parts: int, part: int) -> tuple[int, int]:
    """First row and number of rows of one chunk of `chunk_rows`.

    >>> chunk_of(10, 4, 3)
    (9, 1)
    """
    if isinstance(parts, UnevenRanks):
        begin, count = parts.part(part)
        each = rows // parts.rows
        return begin * each, count * each
    step = -(-rows // parts)
    begin = min(step * part, rows)
    return begin, min(step, rows - begin)


def chunk_rows(rows: int, parts: int) -> tuple[int, ...]:
    """Sizes of the chunks of a dim of `rows` over `parts` ranks, as in torch.chunk and DTensor.

    >>> chunk_rows(10, 4)
    (3, 3, 3, 1)
    """
    return tuple(chunk_of(rows, parts, part)[1] for part in range(parts))


# Any dim but 0 costs a copy before and after each message, so dim 0 may be a little uneven.
EVEN_ENOUGH = 1.05
"""Largest ratio of a rank's chunk to an even share that counts as even."""


KEPT_EVEN_ENOUGH = 1.25
"""The same where gathered parameters are kept: the copy of each lasts until the backward then."""


def shard_dim(shape: Sequence[int], ranks: int, even_enough: float = EVEN_ENOUGH) -> int:
    """Dim whose chunks over `ranks` are the most even; the first that is even enough.

    >>> shard_dim((50257, 768), 16), shard_dim((8, 4096, 14336), 16), shard_dim((3,), 2)
    (0, 1, 0)
    >>> shard_dim((6656, 16384), 1024), shard_dim((6656, 16384), 1024, KEPT_EVEN_ENOUGH)
    (1, 0)
    """
    excess = [unevenness(size, ranks) for size in shape]
    return next(
        (dim for dim, ratio in enumerate(excess) if ratio <= even_enough),
        excess.index(min(excess)),
    )


def unevenness(size: int, ranks: int) -> float:
    """Ratio of the largest chunk of a dim over some ranks to an even share.

    >>> unevenness(8, 16), unevenness(8, 4)
    (2.0, 1.0)
    """
    return chunk_of(size, ranks, 0)[1] * ranks / size if size else math.inf


def is_even(shape: Sequence[int], placement: Placement, ranks: int) -> bool:
    """Whether all ranks have parts of one size of a tensor, in every step."""
    if not isinstance(placement, Shard):
        return True
    return not isinstance(placement, Routed) and unevenness(shape[placement.dim], ranks) == 1.0


def even_rows(rows: int, parts: int) -> tuple[int, ...]:
    """Number of rows of each part of a batch; parts differ by at most one row.

    >>> even_rows(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(rows // parts + (part < rows % parts) for part in range(parts))


def even_part(rows: int, parts: int, part: int) -> tuple[int, int]:
    """First row and number of rows of one part of `even_rows`.

    >>> even_part(10, 4, 3)
    (8, 2)
    """
    least, more = divmod(rows, parts)
    return least * part + min(part, more), least + (part < more)


@lru_cache(maxsize=256)
def proportional_rows(rows: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Rows of each part, in proportion to the shares and at least one.

    The last of the parts to end, at speeds in proportion to the shares, ends as soon as it can.

    >>> proportional_rows(10, (2.0, 1.0))
    (7, 3)
    """
    held, parts = [max(1, int(rows * share / sum(shares))) for share in shares], range(len(shares))
    while sum(held) < rows:
        held[min(parts, key=lambda part: (held[part] + 1) / shares[part])] += 1
    while sum(held) > rows:
        several = (part for part in parts if held[part] > 1)
        held[max(several, key=lambda part: held[part] / shares[part])] -= 1
    return tuple(held)


def rows_of_parts(rows: int, parts: int, shares: tuple[float, ...] = ()) -> tuple[int, ...]:
    """Number of rows of each part of a batch: in proportion to the shares, even without any."""
    return proportional_rows(rows, shares) if shares else even_rows(rows, parts)
