"""Operators that send a token once to several of its experts.

Rows of experts are copies of tokens: rows `copies * t` to `copies * (t + 1) - 1` are of token t. A
place, a rank or a node, gets each token once. Copies whose experts are at one place are *distinct*
no more: they read, or are summed to, one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import torch
from torch import Tensor

from autopar.core.operators.registration import register
from autopar.core.operators.routing import owners_of

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define(
    "distinct_rows(Tensor experts, int count, int ranks, int near, int copies) -> "
    "(Tensor places, Tensor sent)"
)
_LIBRARY.define(
    "first_rows(Tensor experts, int count, int ranks, int near, int copies, int expected) -> "
    "(Tensor firsts, Tensor wanted)"
)
_LIBRARY.define("passed_rows(Tensor wanted, int expected) -> (Tensor passed, Tensor sent)")
_LIBRARY.define("rows_read(Tensor places, Tensor rows, Tensor distinct, int near) -> Tensor")
_LIBRARY.define("sum_rows(Tensor rows, Tensor places, int[] counts) -> Tensor")

distinct_rows = torch.ops.autopar.distinct_rows.default
"""(experts [rows], count, ranks, near, copies) -> (places [rows], sent).

Places are `ranks // near` groups of neighbouring ranks. `sent` counts the tokens of each, and
`places` has, for rows in the order of their place, the number of their token among these.
"""

first_rows = torch.ops.autopar.first_rows.default
"""(experts [rows], count, ranks, near, copies, expected) -> (firsts, wanted).

`firsts` has a row of each token of each place, in order, and `wanted` which of the `near` ranks
there have an expert of the token. `expected` is the number of both where none ran.
"""

passed_rows = torch.ops.autopar.passed_rows.default
"""(wanted [rows, near], expected) -> (passed, sent [near]): the rows that each rank wants."""

rows_read = torch.ops.autopar.rows_read.default
"""(places [rows], rows [ranks], distinct [ranks], near) -> [rows]: the distinct row of each row.

`rows` and `distinct` count rows by the rank that held them. Distinct ones came by way of the rank
with the same place on this node, of nodes with `near` ranks, in order of these.
"""

sum_rows = torch.ops.autopar.sum_rows.default
"""(rows, places, counts) -> the sum of the rows with each place, of as many as `counts` sum to."""


def distinct_share(count: int, parts: int, copies: int) -> float:
    """Expected number of places that a token goes to, over its number of experts.

    >>> distinct_share(4, 2, 1), round(distinct_share(256, 8, 8), 3)
    (1.0, 0.664)
    """
    copies = min(copies, count)
    absent = comb(count - -(-count // parts), copies) / comb(count, copies)
    return parts * (1 - absent) / copies


def _by_place(owners: Tensor, copies: int) -> tuple[Tensor, Tensor]:
    """Rows in the order of their places, and whether each is the first of its token there."""
    order = owners.argsort(stable=True)
    pairs = torch.stack((owners[order], order // copies))
    is_first = torch.ones_like(order, dtype=torch.bool)
    is_first[1:] = (pairs[:, 1:] != pairs[:, :-1]).any(0)
    return order, is_first


def _distinct(
    experts: Tensor, count: int, ranks: int, near: int, copies: int
) -> tuple[Tensor, Tensor]:
    owners = owners_of(experts, count, ranks) // near
    order, is_first = _by_place(owners, copies)
    place = owners[order]
    sent = place.new_zeros(ranks // near).index_add(0, place, is_first.long())
    return is_first.cumsum(0) - 1 - (sent.cumsum(0) - sent)[place], sent


def _fake_distinct(
    experts: Tensor, count: int, ranks: int, near: int, copies: int
) -> tuple[Tensor, Tensor]:
    places = experts.new_empty(experts.shape, dtype=torch.int64)
    return places, experts.new_empty(ranks // near, dtype=torch.int64)


def _firsts(
    experts: Tensor, count: int, ranks: int, near: int, copies: int, expected: int
) -> tuple[Tensor, Tensor]:
    owners = owners_of(experts, count, ranks)
    order, is_first = _by_place(owners // near, copies)
    firsts = order[is_first]
    wanted = torch.zeros(len(firsts), near, dtype=torch.uint8, device=experts.device)
    wanted[is_first.cumsum(0) - 1, owners[order] % near] = 1
    return firsts, wanted


def _fake_firsts(
    experts: Tensor, count: int, ranks: int, near: int, copies: int, expected: int
) -> tuple[Tensor, Tensor]:
    firsts = experts.new_empty(expected, dtype=torch.int64)
    return firsts, experts.new_empty((expected, near), dtype=torch.uint8)


def _passed(wanted: Tensor, expected: int) -> tuple[Tensor, Tensor]:
    return wanted.t().nonzero()[:, 1].contiguous(), wanted.sum(0, dtype=torch.int64)


def _fake_passed(wanted: Tensor, expected: int) -> tuple[Tensor, Tensor]:
    passed = wanted.new_empty(expected, dtype=torch.int64)
    return passed, wanted.new_empty(wanted.shape[1], dtype=torch.int64)


def _read(places: Tensor, rows: Tensor, distinct: Tensor, near: int) -> Tensor:
    arrived = distinct.view(-1, near).t().reshape(-1)
    begins = (arrived.cumsum(0) - arrived).view(near, -1).t().reshape(-1)
    return begins.repeat_interleave(rows, output_size=len(places)) + places


def _fake_read(places: Tensor, rows: Tensor, distinct: Tensor, near: int) -> Tensor:
    return torch.empty_like(places)


def _sum(rows: Tensor, places: Tensor, counts: Sequence[int]) -> Tensor:
    # Sums of half precision are rounded once, as those of torch.sum.
    wide = torch.float32 if rows.dtype in (torch.bfloat16, torch.float16) else rows.dtype
    zeros = rows.new_zeros((sum(counts), *rows.shape[1:]), dtype=wide)
    return zeros.index_add(0, places, rows.to(wide)).to(rows.dtype)


def _fake_sum(rows: Tensor, places: Tensor, counts: Sequence[int]) -> Tensor:
    return rows.new_empty((sum(counts), *rows.shape[1:]))


register(
    _LIBRARY,
    {
        "distinct_rows": (_distinct, _fake_distinct),
        "first_rows": (_firsts, _fake_firsts),
        "passed_rows": (_passed, _fake_passed),
        "rows_read": (_read, _fake_read),
        "sum_rows": (_sum, _fake_sum),
    },
)
