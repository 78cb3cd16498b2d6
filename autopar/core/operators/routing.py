"""Operators that send rows to the ranks that hold their experts.

How many rows go from one rank to another depends on the router, and is known only in a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.core.ir.placement import chunk_rows
from autopar.core.operators.registration import register

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define(
    "route_rows(Tensor experts, int count, int ranks) -> "
    "(Tensor order, Tensor inverse, Tensor sent)"
)
_LIBRARY.define(
    "arriving_rows(Tensor table, int rank, int expected) -> int[]",
    tags=(torch.Tag.data_dependent_output,),
)
_LIBRARY.define(
    "row_counts(Tensor counts, int expected, bool distinct=False) -> int[]",
    tags=(torch.Tag.data_dependent_output,),
)
route_rows = torch.ops.autopar.route_rows.default
"""(experts [rows], count, ranks) -> (order [rows], inverse [rows], sent [ranks]).

`order` has the rows by the rank that holds their expert, of `count` experts in chunks, and
`inverse` the place of each row in that order. `sent` counts the rows of each rank.
"""

row_counts = torch.ops.autopar.row_counts.default
"""(counts [ranks], expected, distinct) -> the counts as numbers.

`expected` is their sum where none ran. `distinct` ones count rows of tokens, not of their copies.
"""


arriving_rows = torch.ops.autopar.arriving_rows.default
"""(table [ranks, ranks], rank, expected) -> the numbers of rows that a rank receives from each.

`table` has the rows that each rank sends to each. They are noted in `LOADS`.
"""


@dataclass
class Loads:
    """Loads of the busiest ranks, of all layers so far.

    Attributes:
        ratios: sum of their rows over even shares.
        layers: number of layers that were run.
    """

    ratios: float = 0.0
    layers: int = 0


LOADS = Loads()
"""Loads that this process has seen."""


def owners_of(experts: Tensor, count: int, ranks: int) -> Tensor:
    """The rank that holds each of some experts, of `count` in chunks."""
    sizes = torch.tensor(chunk_rows(count, ranks), device=experts.device)
    ends = sizes.cumsum(0)[:-1]
    return torch.searchsorted(ends, experts.long().contiguous(), right=True)


def _route(experts: Tensor, count: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    owners = owners_of(experts, count, ranks)
    order = owners.argsort(stable=True)
    return order, order.argsort(), torch.bincount(owners, minlength=ranks)


def _fake_route(experts: Tensor, count: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    order, inverse = (experts.new_empty(experts.shape, dtype=torch.int64) for _ in range(2))
    return order, inverse, experts.new_empty(ranks, dtype=torch.int64)


def _counts(counts: Tensor, expected: int, distinct: bool = False) -> list[int]:
    numbers: list[int] = counts.tolist()
    return numbers


def _fake_counts(counts: Tensor, expected: int, distinct: bool = False) -> list[int]:
    ranks = counts.shape[0]
    return [expected // ranks + (rank < expected % ranks) for rank in range(ranks)]


def _arriving(table: Tensor, rank: int, expected: int) -> list[int]:
    loads = table.sum(0)
    *numbers, busiest, total = torch.cat(
        (table[:, rank], loads.max()[None], loads.sum()[None])
    ).tolist()
    if total:
        LOADS.ratios += busiest * len(loads) / total
        LOADS.layers += 1
    return numbers


def _fake_arriving(table: Tensor, rank: int, expected: int) -> list[int]:
    return _fake_counts(table, expected)


register(
    _LIBRARY,
    {
        "route_rows": (_route, _fake_route),
        "row_counts": (_counts, _fake_counts),
        "arriving_rows": (_arriving, _fake_arriving),
    },
)
