"""`RowRouter`: rows of tokens sent to the ranks of their experts, and back.

A rank sends each row to the rank that holds its expert, by an all-to-all whose chunks have as many
rows as the router decides in a step. Ranks tell each other these numbers first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import getitem

from torch import fx

from autopar.core.ir.graph import Value, elements, tensors
from autopar.core.ir.placement import Placement, Routed, Shard, chunk_of
from autopar.core.operators.routing import arriving_rows, route_rows, row_counts
from autopar.passes.core.collective_ops import collective, start_all_gather, start_all_to_all
from autopar.passes.core.node_builder import aten, call
from autopar.passes.rules.redistribute import RedistributeStep, redistribute_steps
from autopar.passes.rules.routed_rows import Region
from autopar.passes.rules.token_copies import copies_of, summed_copies, whole_tokens
from autopar.passes.tensor_parallel.token_hops import TokenHops, select, token_hops


@dataclass(frozen=True)
class Way:
    """One rank's rows of a region, by the ranks of their experts.

    Attributes:
        order: rows in the order in which they are sent.
        inverse: place of each row in that order.
        sent: number of rows for each rank.
        received: number of rows from each rank.
    """

    order: fx.Node
    inverse: fx.Node
    sent: fx.Node
    received: fx.Node


@dataclass
class RowRouter:
    """Writes exchanges of rows for one rank of an axis.

    Attributes:
        regions: region of each operator that may run on routed rows.
        once: neighbouring ranks to which a token is sent once, a rank or those of a node; 0: it is
            sent to each of its experts.
        ways: of the rows of each region, by the pieces of their shards and by pipeline stage.
        hops: of the tokens of each way, by the number of their copies.
        counts: numbers of rows that each phase has read.
        routed: rows of values that were exchanged, by the placement that they have then.
    """

    graph: fx.Graph
    ranks: int
    rank: int
    axis: str
    regions: Mapping[fx.Node, Region]
    once: int
    ways: dict[tuple[Region, int, int | None], Way] = field(default_factory=dict)
    hops: dict[tuple[Way, int], TokenHops] = field(default_factory=dict)
    counts: dict[tuple[fx.Node, str], fx.Node] = field(default_factory=dict)
    routed: dict[tuple[Value, Placement, Region, int | None], fx.Node] = field(default_factory=dict)

    def region(self, step: RedistributeStep, value: Value, reader: fx.Node) -> Region | None:
        """The region whose rows a step exchanges; None for other steps."""
        if step.kind == "route":
            return self.regions[reader]
        return self.regions[value.node] if step.kind == "route_back" else None

    def steps(
        self, before: Placement, after: Placement, node: fx.Node, reader: fx.Node
    ) -> tuple[RedistributeStep, ...] | None:
        """The steps of a node's redistribution; rows go back before they leave a pipeline stage."""
        leaves = node.meta.get("stage") != reader.meta.get("stage")
        if before == after and isinstance(before, Routed) and leaves:
            shard = Shard(0, before.interleave)
            steps = redistribute_steps(before, shard), redistribute_steps(shard, after)
            return (*(steps[0] or ()), *(steps[1] or ()))
        return redistribute_steps(before, after)

    def write(
        self,
        step: RedistributeStep,
        node: fx.Node,
        region: Region,
        experts: fx.Node,
        source: fx.Node,
        like: fx.Node,
        stage: int | None,
    ) -> fx.Node:
        """The rows of a node after a step.

        `experts` are those of this rank's shard of rows, and `source` the node on whole tensors.
        """
        key = (region, step.shards[0].interleave, stage)
        if key not in self.ways:
            self.ways[key] = self.way(region, experts, like)
        way, (over,) = self.ways[key], node.meta.get("batch_dims", ((),))
        here = tensors(experts)[0].shape[0]
        there = chunk_of(tensors(region.experts)[0].shape[0], self.ranks, self.rank)[1]
        sent = self.count(way.sent, here, like)
        received = self.count(way.received, there, like)
        if copies := self.copies(step, source, region):
            if (way, copies) not in self.hops:
                counts = received, sent
                hops = token_hops(self, way, region, experts, copies, counts, like)
                self.hops[way, copies] = hops
            hops = self.hops[way, copies]
            return (hops.send if step.kind == "route" else hops.send_back)(self, node, like)
        if step.kind == "route":
            ordered = select(self, node, way.order, like)
            return self.exchange(ordered, over, like, received, sent)
        back = self.exchange(node, over, like, sent, received)
        return select(self, back, way.inverse, like)

    def copies(self, step: RedistributeStep, source: fx.Node, region: Region) -> int:
        """Rows of each token that are sent as one; 0 if each is sent by itself."""
        copies = (copies_of if step.kind == "route" else summed_copies)(source)
        rows = tensors(region.experts)[0].shape[0]
        is_merged = self.once and copies > 1
        return copies if is_merged and whole_tokens(rows, self.ranks, step.shards[0], copies) else 0

    def way(self, region: Region, experts: fx.Node, like: fx.Node) -> Way:
        """Sorts a rank's rows, and has all ranks say how many rows they send."""
        (over,) = experts.meta.get("batch_dims", ((),))
        made = call(self.graph, like, route_rows, experts, region.count, self.ranks)
        parts = [call(self.graph, like, getitem, made, place) for place in range(3)]
        if "batch_dims" in experts.meta:
            made.meta["batch_dims"] = (over, over, ())
        self.annotate(parts[:2], over, experts)
        self.annotate(parts[2:], (), experts)
        order, inverse, sent = parts
        size = self.ranks * self.ranks
        (told,) = collective(self.graph, like, start_all_gather, [sent], [size], self.axis)
        table = call(self.graph, like, aten.view.default, told, [self.ranks, self.ranks])
        received = call(self.graph, like, aten.select.int, table, 1, self.rank)
        done = told.all_input_nodes[0]
        self.annotate([done.all_input_nodes[0], done, told, table, received], (), sent)
        way = Way(order, inverse, sent, received)
        rows = chunk_of(tensors(region.experts)[0].shape[0], self.ranks, self.rank)[1]
        numbers = call(self.graph, like, arriving_rows, table, self.rank, rows)
        self.annotate([numbers], (), sent)
        self.counts[received, like.meta["phase"]] = numbers
        return way

    def count(self, counts: fx.Node, rows: int, like: fx.Node, distinct: bool = False) -> fx.Node:
        """The numbers of rows that a tensor has, read once in each phase.

        `distinct` ones count tokens, not their copies.
        """
        key = (counts, like.meta["phase"])
        if key not in self.counts:
            self.counts[key] = call(self.graph, like, row_counts, counts, rows, distinct)
            self.annotate([self.counts[key]], (), counts)
        return self.counts[key]

    def exchange(
        self,
        node: fx.Node,
        over: tuple[int, ...],
        like: fx.Node,
        *counts: fx.Node,
        axis: str = "",
    ) -> fx.Node:
        """Chunks of a node from all ranks: even ones, or as many rows as are received and sent."""
        options = (axis or self.axis, *counts)
        (result,) = collective(self.graph, like, start_all_to_all, [node], *options)
        done = result.all_input_nodes[0]
        self.annotate([done.all_input_nodes[0], done, result], over, node)
        return result

    def annotate(self, nodes: Iterable[fx.Node], over: tuple[int, ...], like: fx.Node) -> None:
        """Records which dims of new nodes run over the batch, in a graph that knows of them."""
        if "batch_dims" in like.meta:
            for node in nodes:
                node.meta["batch_dims"] = (over,) * len(elements(node))
