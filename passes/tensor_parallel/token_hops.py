"""`TokenHops`: tokens sent once to each rank, or each node, that has several of their experts.

Across nodes a token goes to the rank with this rank's place on the node, which passes it on to its
neighbours. Back come sums, by the same hops.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem
from typing import TYPE_CHECKING

from torch import fx

from autopar.core.ir.graph import tensors
from autopar.core.ir.mesh_levels import INTER_NODE, INTRA_NODE, level
from autopar.core.operators.row_copies import (
    distinct_rows,
    distinct_share,
    first_rows,
    passed_rows,
    rows_read,
    sum_rows,
)
from autopar.passes.core.node_builder import aten, call

if TYPE_CHECKING:
    from autopar.passes.rules.routed_rows import Region
    from autopar.passes.tensor_parallel.row_router import RowRouter, Way


@dataclass(frozen=True)
class Hop:
    """An exchange of distinct rows.

    Attributes:
        axis: axis or level whose ranks exchange them.
        picked: the row that is sent, of those from the hop before.
        sent: number of rows for each rank.
        received: number of rows from each rank.
        rows: expected number of rows sent, and received.
    """

    axis: str
    picked: fx.Node
    sent: fx.Node
    received: fx.Node
    rows: int


@dataclass(frozen=True)
class TokenHops:
    """Exchanges that bring each token to the ranks of its experts, and sums of its copies back.

    Attributes:
        hops: exchanges in order; the last goes to the ranks of the experts.
        read: the distinct row of each row of an expert.
        held: number of rows of this rank before the first hop.
    """

    hops: tuple[Hop, ...]
    read: fx.Node
    held: int

    def send(self, router: RowRouter, node: fx.Node, like: fx.Node) -> fx.Node:
        """A row for each expert, at its rank, of copies of tokens."""
        (over,) = node.meta.get("batch_dims", ((),))
        for hop in self.hops:
            node = select(router, node, hop.picked, like)
            counts = (router.count(own, hop.rows, like, True) for own in (hop.received, hop.sent))
            node = router.exchange(node, over, like, *counts, axis=hop.axis)
        return select(router, node, self.read, like)

    def send_back(self, router: RowRouter, node: fx.Node, like: fx.Node) -> fx.Node:
        """Rows at their first rank whose sum over each token's copies is that of `node`'s rows."""
        (over,) = node.meta.get("batch_dims", ((),))
        places = self.read
        for hop in reversed(self.hops):
            back = hop.received, hop.sent
            sent, received = (router.count(own, hop.rows, like, True) for own in back)
            node = self._sum(router, node, places, sent, over, like)
            node = router.exchange(node, over, like, received, sent, axis=hop.axis)
            places = hop.picked
        return self._sum(router, node, places, [self.held], over, like)

    def _sum(
        self,
        router: RowRouter,
        node: fx.Node,
        places: fx.Node,
        counts: fx.Node | list[int],
        over: tuple[int, ...],
        like: fx.Node,
    ) -> fx.Node:
        total = call(router.graph, like, sum_rows, node, places, counts)
        router.annotate([total], over, node)
        return total


def select(router: RowRouter, node: fx.Node, places: fx.Node, like: fx.Node) -> fx.Node:
    """Rows of a node, by their places."""
    (over,) = node.meta.get("batch_dims", ((),))
    rows = call(router.graph, like, aten.index_select.default, node, 0, places)
    router.annotate([rows], over, node)
    return rows


def token_hops(
    router: RowRouter,
    way: Way,
    region: Region,
    experts: fx.Node,
    copies: int,
    numbers: tuple[fx.Node, fx.Node],
    like: fx.Node,
) -> TokenHops:
    """Finds a rank's distinct rows, and has all ranks say how many these are.

    Args:
        router: the axis along which rows are sent.
        way: that of each copy by itself.
        region: operators to which the rows go.
        experts: those of this rank's rows.
        copies: number of rows of each token.
        numbers: rows received from and sent to each rank, with all copies.
        like: node before which all is written.
    """
    graph, ranks, near = router.graph, router.ranks, router.once
    (over,), held = experts.meta.get("batch_dims", ((),)), tensors(experts)[0].shape[0]

    def parts(made: fx.Node, *dims: tuple[int, ...]) -> list[fx.Node]:
        if "batch_dims" in experts.meta:
            made.meta["batch_dims"] = dims
        found = [call(graph, like, getitem, made, place) for place in range(2)]
        for part, own in zip(found, dims, strict=True):
            router.annotate([part], own, experts)
        return found

    def expected(places: int) -> int:
        return max(1, round(held * distinct_share(region.count, places, copies)))

    def made(near: int) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
        """Places of rows, numbers of distinct ones, the first of these, and who wants them."""
        options = (experts, region.count, ranks, near, copies)
        places, sent = parts(call(graph, like, distinct_rows, *options), over, ())
        rows = expected(ranks // near)
        firsts, wanted = parts(call(graph, like, first_rows, *options, rows), over, over)
        return places, sent, firsts, wanted

    places, sent, firsts, _ = made(1)
    distinct = router.exchange(sent, (), like)
    hops = [Hop(router.axis, firsts, sent, distinct, expected(ranks))]
    if near > 1:
        between, within = level(router.axis, INTER_NODE), level(router.axis, INTRA_NODE)
        _, sent, firsts, wanted = made(near)
        received = router.exchange(sent, (), like, axis=between)
        hops = [Hop(between, firsts, sent, received, expected(ranks // near))]
        counts = [router.count(own, hops[0].rows, like, True) for own in (received, sent)]
        arrived = router.exchange(wanted, over, like, *counts, axis=between)
        passing = call(graph, like, passed_rows, arrived, expected(ranks))
        passed, sent = parts(passing, over, ())
        received = router.exchange(sent, (), like, axis=within)
        hops.append(Hop(within, passed, sent, received, expected(ranks)))
    here = router.exchange(places, over, like, *numbers)
    read = call(graph, like, rows_read, here, way.received, distinct, near)
    router.annotate([read], over, experts)
    return TokenHops(tuple(hops), read, int(held))
