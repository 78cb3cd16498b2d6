"""Times of groups that were not measured, from measured groups on a uniform fabric.

A collective takes as long over the wanted groups as over the measured ones if the busiest link
carries as many bytes: the bus-bandwidth curve is reused. The latency grows with the steps of the
ring or tree: by the difference in NCCL's own model, if that is known, otherwise in proportion. On a
mesh of NVLinks, whose subsets differ, the error would be a half.

Ranks that share cores slow each other down: time grows as max(1, busy ranks / cores). The effective
number of cores comes from groups measured alone and side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import median

from autopar.cost_model.collectives import ring
from autopar.cost_model.cost import Cost
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.nccl.constants import LATEST, constants_of

Prior = Callable[[CurveKey, float], float | None]
"""Modelled seconds of groups and bytes; None without a model."""

_ONE_PAIR = {"all_to_all": 1.5, "all_gather": 1.25}
"""Slowdown of gloo between two ranks beyond their bytes: on their one connection, the permission to
send queues behind the data of the other direction. Measured with torch 2.13 on links of
100 Mbit/s: 1.40 to 1.49 and 1.19 to 1.23 for 2 to 4 MB, 1.0 among three and four ranks."""

PER_DOUBLING = 0.08
"""Relative error for each doubling of ranks, nodes or groups, added to the curve's."""


@dataclass(frozen=True)
class Fabric:
    """Properties that all groups of a cluster share.

    Attributes:
        trees: whether large all-reduces between nodes use trees (NVLS trees).
        cores: ranks of a node that can be busy without slowing each other down.
    """

    backend: str
    ranks_per_node: int
    nics: int
    trees: bool
    cores: float = math.inf

    def link_bytes(self, collective: str, shape: GroupShape) -> float:
        """Bytes through the busiest link for each byte of the message.

        On one node that is a rank's link. Between nodes it is all NICs of a node together: a group
        that reaches or has only a part of them sends the more through that part.
        """
        n, nodes = shape.ranks, shape.nodes
        share = ring(collective, n, self.backend)[1]
        if nodes > 1 and collective == "all_to_all":
            share = shape.ranks_per_node * (nodes - 1) / nodes
        elif nodes > 1 and collective == "all_reduce" and self.trees:
            share = 2 * (nodes - 1) / nodes
        if self.backend == "gloo":
            share = _broadcast_messages(0, n) if collective == "broadcast" else share
            share *= _ONE_PAIR.get(collective, 1.0) if n == 2 else 1.0
        return share if nodes == 1 else share / self.nic_share(shape)

    def nic_share(self, shape: GroupShape) -> float:
        """Share of a node's NICs that a group has to itself."""
        ranks = shape.ranks_per_node
        reached = math.ceil(ranks * self.nics / self.ranks_per_node) / self.nics
        return min(1.0, reached, ranks / max(ranks, self.active(shape)))

    def active(self, shape: GroupShape) -> int:
        """Busy ranks of a node while all groups of a shape run."""
        most = max(self.ranks_per_node, shape.ranks_per_node)
        return min(most, shape.ranks_per_node * shape.groups)

    def oversubscription(self, shape: GroupShape) -> float:
        """Slowdown of the cores' work because ranks share them."""
        return max(1.0, self.active(shape) / self.cores)

    def steps(self, collective: str, shape: GroupShape) -> float:
        return ring(collective, shape.ranks, self.backend)[0]

    def floor_s(self, collective: str, shape: GroupShape) -> float:
        """Seconds of an empty message by NCCL's constants, without the launch."""
        if self.backend != "nccl":
            return 0.0
        constants = constants_of(LATEST)
        steps, crossings = self.steps(collective, shape), 0.0
        if shape.nodes > 1:
            crossings = steps * (shape.nodes - 1) / (shape.ranks - 1)
        near, far = constants.nvlink["ring"][0], constants.net["ring"][0]
        best = (steps - crossings) * max(near, 1.0 if crossings else 0.0) + crossings * far
        if collective == "all_reduce":
            near, far = constants.nvlink["tree"][0], constants.net["tree"][0]
            levels = math.log2(shape.nodes)
            best = min(best, 2 * ((shape.ranks_per_node - 1) * near + levels * far))
        return best * 1e-6


def _broadcast_messages(rank: int, ranks: int) -> int:
    """Time of gloo's broadcast below a rank, in messages: a binomial tree of whole messages.

    A rank sends to all its children at once, so all receive the message when the last one does.
    Measured on links of 100 Mbit/s: 1.03, 2.06 and 2.9 to 3.0 messages among 2, 3 and 4 ranks.
    """
    reach = (rank & -rank) or ranks
    children = [rank + 2**j for j in range(ranks.bit_length()) if 2**j < reach]
    children = [child for child in children if child < ranks]
    return len(children) + max((_broadcast_messages(child, ranks) for child in children), default=0)


def derive(
    curves: Mapping[CurveKey, Measured],
    wanted: CurveKey,
    nbytes: float,
    fabric: Fabric,
    prior: Prior = lambda key, nbytes: None,
) -> Cost | None:
    """The time of a group that was not measured; None without a measured group like it.

    Groups on one node are derived from groups on one node, and others from others, because the
    fabrics differ.
    """
    alike = {
        key: entry
        for key, entry in curves.items()
        if key.collective == wanted.collective
        and (key.shape.nodes == 1) == (wanted.shape.nodes == 1)
    }
    if not alike:
        return None
    base = min(alike, key=lambda key: _distance(key, wanted, fabric))
    entry = alike[base]
    seconds = _scaled(entry.curve, base, wanted, nbytes, fabric, prior)
    error = entry.curve.error(nbytes) + PER_DOUBLING * _distance(base, wanted, fabric)[0]
    return Cost(seconds, f"modelled by ring scaling from {base.shape}, {entry.provenance}", error)


def _distance(key: CurveKey, wanted: CurveKey, fabric: Fabric) -> tuple[float, int, bool]:
    """Doublings between two shapes, then preferring larger groups, then the same dtype.

    Groups count as far as they share a node.
    """
    one, other = key.shape, wanted.shape
    pairs = (
        (one.nodes, other.nodes),
        (one.ranks_per_node, other.ranks_per_node),
        (fabric.active(one) / one.ranks_per_node, fabric.active(other) / other.ranks_per_node),
    )
    away = sum(abs(math.log2(a / b)) for a, b in pairs)
    return away, -key.shape.ranks, key.dtype != wanted.dtype


def _scaled(
    curve: Curve,
    base: CurveKey,
    wanted: CurveKey,
    nbytes: float,
    fabric: Fabric,
    prior: Prior,
) -> float:
    """The base's time at equal bytes on the busiest link, with the latency of the wanted steps."""
    share = fabric.link_bytes(wanted.collective, wanted.shape)
    equal = nbytes * share / fabric.link_bytes(base.collective, base.shape)
    whole = curve(equal)
    # NCCL's model is far off for small messages. So it gives only the difference of two groups,
    # and the measured curve the rest.
    more, less = prior(wanted, nbytes), prior(base, equal)
    if more is not None and less is not None:
        return whole + max(more - less, -whole / 2)
    floor = curve.pieces[0].latency_s
    nearest = min(curve.pieces, key=lambda piece: abs(piece(equal) - whole))
    latency = min(whole, max(floor, nearest.latency_s))
    steps = fabric.steps(wanted.collective, wanted.shape)
    growth = steps / fabric.steps(base.collective, base.shape)
    slowdown = fabric.oversubscription(wanted.shape) / fabric.oversubscription(base.shape)
    if fabric.backend == "nccl":
        longer = fabric.floor_s(wanted.collective, wanted.shape)
        longer -= fabric.floor_s(base.collective, base.shape)
        return whole + max(longer, -floor / 2) + (latency - floor) * (growth - 1)
    if wanted.shape.nodes == 1:
        return (whole + latency * (growth - 1)) * slowdown
    return whole + latency * (growth * slowdown - 1)  # NICs, not cores, carry the bytes


def effective_cores(curves: Mapping[CurveKey, Measured], ranks_per_node: int) -> float:
    """Ranks of a node that can be busy at once, from groups measured alone and side by side.

    The median over all collectives and sizes; infinite without a slowdown or without such pairs.
    """
    found: list[float] = []
    for few, many in permutations(curves, 2):
        alike = replace(few, shape=replace(few.shape, groups=many.shape.groups)) == many
        if few.shape.nodes > 1 or not alike or few.shape.groups >= many.shape.groups:
            continue
        fewer, more = (
            min(ranks_per_node, k.shape.ranks_per_node * k.shape.groups) for k in (few, many)
        )
        quick, slow = curves[few].curve, curves[many].curve
        for nbytes, seconds in zip(slow.bytes, slow.seconds, strict=True):
            if fewer < more and quick.bytes[0] <= nbytes <= quick.bytes[-1]:
                longer = seconds / quick(nbytes)
                found.append(max(fewer, more / longer) if longer > 1 else math.inf)
    return median(found) if found else math.inf
