"""`Dispatch`: tokens that go to their experts once for each rank, or each node, and the prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from autopar.core.ir.graph import TrainingGraph, Value, tensor_bytes, tensors
from autopar.core.ir.mesh_levels import INTER_NODE, INTRA_NODE, level
from autopar.core.ir.placement import Routed
from autopar.core.operators.row_copies import distinct_share
from autopar.cost_model.cost import Cost
from autopar.passes.rules.redistribute import ROUTES, RedistributeStep
from autopar.passes.rules.routed_rows import AXIS, may_route, regions_of
from autopar.passes.rules.token_copies import tokens_sent, whole_tokens

if TYPE_CHECKING:
    from autopar.planner.placement.costs import PlacementCosts


COUNT_BYTES = 8
"""Bytes of a number of rows, or of the place of one."""


@dataclass(frozen=True)
class Tokens:
    """Rows that are copies of tokens, or are summed to tokens.

    Attributes:
        copies: number of rows of each token.
        experts: number of experts.
        routed: experts of the rows.
    """

    copies: int
    experts: int
    routed: fx.Node

    def share(self, places: int) -> float:
        """Expected ratio of the rows sent, one for each token and place, to all rows."""
        return distinct_share(self.experts, places, self.copies)

    def hops(self, once: int, ranks: int) -> list[tuple[str, float]]:
        """Axis or level of each message, and its share of all rows; `once` as in `Partition`."""
        if once > 1:
            parts = (level(AXIS, INTER_NODE), ranks // once), (level(AXIS, INTRA_NODE), ranks)
            return [(name, self.share(places)) for name, places in parts]
        return [(AXIS, self.share(ranks) if once else 1.0)]


@dataclass(frozen=True)
class Dispatch:
    """Values that are sent as tokens along the axis of experts, and where a token goes once.

    Attributes:
        once: as `Partition.once`.
        tokens: what the rows of each such value are.
    """

    once: int = 0
    tokens: Mapping[fx.Node, Tokens] = field(default_factory=dict)

    def of(self, step: RedistributeStep, value: Value, ranks: int) -> Tokens | None:
        """The tokens of the rows that a step sends; None where it sends each row."""
        tokens = self.tokens.get(value.node)
        if tokens is None or not self.once or step.kind not in ROUTES:
            return None
        is_whole = whole_tokens(value.tensor.shape[0], ranks, step.shards[0], tokens.copies)
        return tokens if is_whole else None


def dispatch_along(
    graph: TrainingGraph,
    ranks: int,
    prices: PlacementCosts | None,
    near: int,
    by_level: bool | None,
) -> Dispatch:
    """The cheapest dispatch along an axis before which a graph stands.

    Args:
        graph: graph before its partition along the axis.
        ranks: size of the axis.
        prices: of messages along the axis and its levels; None: fewest rows.
        near: neighbouring ranks of the axis on a node.
        by_level: whether a token goes once to each node; None: where that is cheaper.
    """
    tokens = tokens_along(graph, ranks)
    levels = [near] if 1 < near < ranks and ranks % near == 0 else []
    if not tokens:
        return Dispatch()
    if levels and by_level:
        return Dispatch(near, tokens)
    if prices is None:
        saves = any(own.share(ranks) < 1 for own in tokens.values())
        return Dispatch(int(saves), tokens)
    ways = [Dispatch(once, tokens) for once in (0, 1, *(levels if by_level is None else []))]
    layers = {own.routed: own for own in tokens.values()}

    def seconds(way: Dispatch) -> float:
        rows = sum(
            sending(prices, way.once, tensor_bytes(val) // ranks, own, val.dtype).seconds
            for val, own in ((tensors(node)[0], own) for node, own in tokens.items())
        )
        return rows + sum(
            agreeing_s(prices, way.once, tensors(experts)[0].shape[0] // ranks, own)
            for experts, own in layers.items()
        )

    return min(ways, key=seconds)


def tokens_along(graph: TrainingGraph, ranks: int) -> dict[fx.Node, Tokens]:
    """Values of a graph that may be sent as tokens along the axis of experts."""
    sent = tokens_sent(regions_of(graph)) if may_route(graph) else {}
    return {
        node: Tokens(copies, region.count, region.experts)
        for node, (copies, region) in sent.items()
        if whole_tokens(tensors(node)[0].shape[0], ranks, Routed(), copies)
    }


def sending(
    prices: PlacementCosts, once: int, nbytes: int, own: Tokens, dtype: torch.dtype
) -> Cost:
    """Cost of the messages and copies of a rank's rows of `nbytes`.

    Rows are copied before each message, and once more at their expert.
    """
    hops = own.hops(once, prices.shape.ranks)
    costs = [prices.along(name, "all_to_all", round(nbytes * part), dtype) for name, part in hops]
    copied = 2 * nbytes * (sum(part for _, part in hops) + bool(once))
    copy_s = prices.operators.roofline.seconds(0.0, copied, dtype.itemsize)
    return replace(costs[0], seconds=sum(cost.seconds for cost in costs) + copy_s)


def agreeing_s(prices: PlacementCosts, once: int, rows: int, own: Tokens) -> float:
    """Seconds in which ranks tell each other which of a rank's rows are of one token."""
    ranks = prices.shape.ranks
    messages = [(AXIS, ranks * COUNT_BYTES), (AXIS, rows * COUNT_BYTES)] if once else []
    if once > 1:
        between, within = level(AXIS, INTER_NODE), level(AXIS, INTRA_NODE)
        wanted = round(rows * own.share(ranks // once)) * once
        messages += [(between, ranks // once * COUNT_BYTES), (between, wanted)]
        messages += [(within, once * COUNT_BYTES)]
    sent = (prices.along(name, "all_to_all", size, torch.int64) for name, size in messages)
    return sum(cost.seconds for cost in sent)
