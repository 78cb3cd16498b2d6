"""Costs of point-to-point messages of a pipeline, and of messages around its schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from math import prod

from autopar.core.ir.graph import tensor_bytes, tensors
from autopar.core.ir.roles import Gradient, MicrobatchPartial, Parameter
from autopar.core.plan.pipeline import Pipeline
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.cost import ClusterError, Cost
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.simulator.pipeline import PipelineSimulation
from autopar.cost_model.simulator.streams import Event
from autopar.passes.pipeline_parallel.split_stages import PipelineStages


@dataclass(frozen=True)
class P2PCost:
    """Cost of messages between two ranks of a pipeline, the outermost axis of `mesh`."""

    cluster: Cluster
    mesh: tuple[tuple[str, int], ...]

    def seconds(self, nbytes: int, sender: int, receiver: int) -> float:
        return self.priced(nbytes, sender, receiver)[1].seconds if nbytes else 0.0

    def slowest_s(self, nbytes: int) -> float:
        """Seconds of a message between the neighbours that are furthest apart."""
        one_each = {self._shapes(rank, rank + 1): rank for rank in range(self._ranks - 1)}
        return max((self.seconds(nbytes, r, r + 1) for r in one_each.values()), default=0.0)

    def priced(self, nbytes: int, sender: int, receiver: int) -> tuple[Transfer, Cost]:
        """Return one message with its cost: a send, or a broadcast if sends were not timed.

        Raises:
            ClusterError: no such message was measured, and none may be derived.
        """
        key = nbytes, self._shapes(sender, receiver)
        if key not in self._prices:
            self._prices[key] = self._price(*key)
        return self._prices[key]

    @cached_property
    def _prices(self) -> dict[tuple[int, tuple[GroupShape, ...]], tuple[Transfer, Cost]]:
        """Prices that were asked for: a schedule sends alike messages thousands of times."""
        return {}

    def _price(self, nbytes: int, shapes: tuple[GroupShape, ...]) -> tuple[Transfer, Cost]:
        failure: ClusterError | None = None
        for kind, pairs in product(("send", "broadcast"), shapes):
            try:
                cost = self.cluster.seconds(kind, nbytes, pairs)
            except ClusterError as error:
                failure = failure or error
                continue
            return Transfer(kind, "pp", nbytes, pairs, "float32"), cost
        assert failure is not None
        raise failure

    @property
    def _ranks(self) -> int:
        return dict(self.mesh).get("pp", 1)

    def _shapes(self, sender: int, receiver: int) -> tuple[GroupShape, ...]:
        world, node = self.cluster.world_size, self.cluster.ranks_per_node
        low, high = sorted((sender, receiver))
        # A reduced pipeline has three stages, though the whole one may have two.
        beyond = max(0, high + 1 - self._ranks)
        return _pairs(world, node, self._ranks, max(0, low - beyond), high - beyond)


@cache
def _pairs(world: int, node: int, ranks: int, low: int, high: int) -> tuple[GroupShape, ...]:
    """Pairs of two pipeline ranks that send at once; then as many as all ranks of a node have."""
    stride = max(1, world // ranks)
    # Only pairs on two nodes cross the link. With all pairs priced so, a step of 20.6 ms was
    # predicted to take 35.7, and the plan was never tried.
    near = low * stride // node == ((high + 1) * stride - 1) // node
    most = GroupShape(2, 1 + near, max(1, world // 2))
    return (most,) if near or stride >= node else (replace(most, groups=stride), most)


def add_step_boundaries(
    run: PipelineSimulation,
    stages: PipelineStages,
    pipeline: Pipeline,
    link: P2PCost,
    agreement_s: float = 0.0,
    places: Sequence[int] = (),
) -> PipelineSimulation:
    """Adds the messages before and after a schedule, which all ranks await.

    They exchange records in `agreement_s` seconds, send tied parameters, return their gradients,
    and all-reduce batch totals. `places` are the ranks of `stages`, by default as in `pipeline`.
    """
    if pipeline.ranks == 1 and not agreement_s:
        return run
    places = places or pipeline.stage_ranks
    ranks, cluster = prod(size for _, size in link.mesh), link.cluster
    everyone = GroupShape.of_axis({"all": ranks}, "all", cluster.ranks_per_node)
    each = cluster.seconds("all_reduce", 8, everyone, "float64").seconds * (pipeline.ranks > 1)
    lent_s, back_s = _tied_parameter_s(stages, pipeline, link, places)
    roles = (role for graph in stages.stages for role in graph.outputs)
    before_s = agreement_s + lent_s + each * (stages.prologue is not None)
    after_s = back_s + each * any(isinstance(role, MicrobatchPartial) for role in roles)
    end_s = before_s + run.step_s + after_s
    names = [f"rank {rank}" for rank in range(len(run.ends_s))]
    opening = [Event("opening", name, 0.0, before_s, "wait") for name in names if before_s]
    closing = [
        Event("closing", name, before_s + own, end_s, "wait")
        for name, own in zip(names, run.ends_s, strict=True)
        if own < run.step_s + after_s
    ]
    later = (replace(e, start_s=e.start_s + before_s, end_s=e.end_s + before_s)
             for e in run.timeline)  # fmt: skip
    return replace(
        run,
        step_s=end_s,
        ends_s=(end_s,) * len(names),
        transfer_s=run.transfer_s + len(names) * (before_s + after_s),
        exposed_s=run.exposed_s + before_s + after_s,
        timeline=(*opening, *later, *closing),
    )


def _tied_parameter_s(
    stages: PipelineStages, pipeline: Pipeline, link: P2PCost, places: Sequence[int]
) -> tuple[float, float]:
    """Seconds to send tied parameters and to return their gradients, over parallel links."""
    tied, back = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for index, graph in enumerate(stages.stages):
        user = places[index]
        for role, node in zip(graph.inputs, graph.placeholders, strict=True):
            if isinstance(role, Parameter):
                owner = places[pipeline.owners[role.name]]
                tied[owner, user] += tensor_bytes(tensors(node)[0])
        for name in pipeline.owners:
            if (gradient := graph.result(Gradient(Parameter(name)))) is not None:
                owner = places[pipeline.owners[name]]
                back[user, owner] += tensor_bytes(tensors(gradient)[0])
    times = [
        [link.seconds(n, *pair) for pair, n in table.items() if pair[0] != pair[1]]
        for table in (tied, back)
    ]
    return max(times[0], default=0.0), max(times[1], default=0.0)
