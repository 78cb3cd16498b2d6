"""Times of groups that were not measured, from those that were, where the fabric is uniform.

A collective over the wanted groups is taken to last as long as over the measured ones when the
busiest link carries as many bytes: the bus-bandwidth curve is used again. What does not depend on
bytes, the latency, grows with the steps of the ring or tree: by the difference that NCCL's own
model sees between the two, where that is known, otherwise in proportion. On a mesh of NVLinks,
whose subsets differ, this would be off by half.

Ranks that share cores slow each other down: time grows as max(1, busy ranks / cores). How many
cores that is in effect is learnt from groups measured alone and side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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
"""Seconds that a model gives groups and bytes; None where it has no answer."""

_ONE_PAIR = {"all_to_all": 1.5, "all_gather": 1.25}
"""How many times longer gloo takes between two ranks than its bytes do: on their one connection the
permission to send queues behind the data of the other direction. Measured with torch 2.13 on links
of 100 Mbit/s: 1.40 to 1.49 and 1.19 to 1.23 for 2 to 4 MB, 1.0 among three and four ranks."""

PER_DOUBLING = 0.08
"""Error bar for each doubling of ranks, nodes or groups, beside that of the curve used."""


@dataclass(frozen=True)
class Fabric:
    """What groups have in common.

    Attributes:
        backend: "gloo", "nccl", ...
        ranks_per_node: ranks on a full node.
        nics: NICs of a node.
        trees: whether all-reduces between nodes are done by trees at large sizes (NVLS trees).
        cores: ranks of a node that may be busy before they slow each other down.
    """

    backend: str
    ranks_per_node: int
    nics: int
    trees: bool
    cores: float = math.inf

    def link_bytes(self, collective: str, shape: GroupShape) -> float:
        """Bytes through the busiest link for each byte of the message, in units of that link.

        On one node that is a rank's own link. Between nodes it is a node's NICs together: a group
        that does not reach all of them, or shares them, has the more to send through its part.
        """
        n, nodes = shape.ranks, shape.nodes
        share = ring(collective, n, self.backend)[1]
        if nodes > 1 and collective == "all_to_all":
            share = shape.ranks_per_node * (nodes - 1) / nodes
        elif nodes > 1 and collective == "all_reduce" and self.trees:
            share = 2 * (nodes - 1) / nodes
        if self.backend == "gloo":
            share = _turns(0, n) if collective == "broadcast" else share
            share *= _ONE_PAIR.get(collective, 1.0) if n == 2 else 1.0
        return share if nodes == 1 else share / self._nics_reached(shape)

    def _nics_reached(self, shape: GroupShape) -> float:
        """The part of a node's NICs that a group has to itself."""
        own = shape.ranks_per_node
        reached = math.ceil(own * self.nics / self.ranks_per_node) / self.nics
        return min(1.0, reached, own / max(own, self.active(shape)))

    def active(self, shape: GroupShape) -> int:
        """Ranks of a node that are busy while all groups of a shape run, if they fill nodes."""
        room = max(self.ranks_per_node, shape.ranks_per_node)
        return min(room, shape.ranks_per_node * shape.groups)

    def oversubscription(self, shape: GroupShape) -> float:
        """How many times longer what the cores do takes because ranks share them."""
        return max(1.0, self.active(shape) / self.cores)

    def steps(self, collective: str, shape: GroupShape) -> float:
        """Messages one after the other, those of a ring."""
        return ring(collective, shape.ranks, self.backend)[0]

    def floor_s(self, collective: str, shape: GroupShape) -> float:
        """Seconds that NCCL's own constants give an empty message, launch left out."""
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


def _turns(rank: int, ranks: int) -> int:
    """How long gloo's broadcast takes below a rank, in messages: a binomial tree of whole ones.

    A rank sends to all its children at once, so that all have the message when the last has.
    Measured on links of 100 Mbit/s: 1.03, 2.06 and 2.9 to 3.0 messages among 2, 3 and 4 ranks.
    """
    reach = (rank & -rank) or ranks
    children = [rank + 2**j for j in range(ranks.bit_length()) if 2**j < reach]
    children = [child for child in children if child < ranks]
    return len(children) + max((_turns(child, ranks) for child in children), default=0)


def derive(
    curves: Mapping[CurveKey, Measured],
    wanted: CurveKey,
    nbytes: float,
    fabric: Fabric,
    prior: Prior | None = None,
) -> Cost | None:
    """The time of a group that was not measured; None if there is nothing to derive it from.

    Groups on one node are derived from groups on one node, others from others: what lies between
    is another fabric.
    """
    alike = {
        key: entry
        for key, entry in curves.items()
        if key.collective == wanted.collective
        and (key.shape.nodes == 1) == (wanted.shape.nodes == 1)
    }
    if not alike:
        return None
    base = min(alike, key=lambda key: _distance(key, wanted))
    entry = alike[base]
    seconds = _scaled(entry.curve, base, wanted, nbytes, fabric, prior)
    error = entry.curve.error(nbytes) + PER_DOUBLING * _distance(base, wanted)[0]
    return Cost(seconds, f"modelled by ring scaling from {base.shape}, {entry.provenance}", error)


def _distance(key: CurveKey, wanted: CurveKey) -> tuple[float, int, bool]:
    """Doublings between two shapes; of equals the larger is nearer, then the same dtype."""
    pairs = (
        (key.shape.nodes, wanted.shape.nodes),
        (key.shape.ranks_per_node, wanted.shape.ranks_per_node),
        (key.shape.groups, wanted.shape.groups),
    )
    away = sum(abs(math.log2(a / b)) for a, b in pairs)
    return away, -key.shape.ranks, key.dtype != wanted.dtype


def _scaled(
    curve: Curve,
    base: CurveKey,
    wanted: CurveKey,
    nbytes: float,
    fabric: Fabric,
    prior: Prior | None = None,
) -> float:
    """The base's time at equal bytes on the busiest link, its latency that of the wanted steps."""
    share = fabric.link_bytes(wanted.collective, wanted.shape)
    equal = nbytes * share / fabric.link_bytes(base.collective, base.shape)
    whole = curve(equal)
    if prior is not None:
        more, less = prior(wanted, nbytes), prior(base, equal)
        if more is not None and less is not None:
            return whole + max(more - less, -whole / 2)
    floor = curve.pieces[0].latency_s
    latency = min(whole, max(floor, _piece_at(curve, equal)))
    steps = fabric.steps(wanted.collective, wanted.shape)
    growth = steps / fabric.steps(base.collective, base.shape)
    crowded = fabric.oversubscription(wanted.shape) / fabric.oversubscription(base.shape)
    if fabric.backend == "nccl":
        longer = fabric.floor_s(wanted.collective, wanted.shape)
        longer -= fabric.floor_s(base.collective, base.shape)
        return whole + max(longer, -floor / 2) + (latency - floor) * (growth - 1)
    if wanted.shape.nodes == 1:
        return (whole + latency * (growth - 1)) * crowded
    return whole + latency * (growth * crowded - 1)  # cores have no part in what the NICs carry


def _piece_at(curve: Curve, nbytes: float) -> float:
    """The latency of the affine piece that is nearest the curve at a size."""
    time = curve(nbytes)
    return min(curve.pieces, key=lambda piece: abs(piece(nbytes) - time)).latency_s


def effective_cores(curves: Mapping[CurveKey, Measured], ranks_per_node: int) -> float:
    """How many ranks of a node do not slow each other down, by groups alone and side by side.

    The median over all collectives and sizes of how much longer the crowded ones take; infinite if
    they do not, or if there are no such pairs.
    """
    found = [
        cores
        for few, many in permutations(curves, 2)
        if few.shape.nodes == 1
        and replace(few, shape=replace(few.shape, groups=many.shape.groups)) == many
        and few.shape.groups < many.shape.groups
        for cores in _cores(few, many, curves, ranks_per_node)
    ]
    return median(found) if found else math.inf


def _cores(
    few: CurveKey, many: CurveKey, curves: Mapping[CurveKey, Measured], ranks_per_node: int
) -> Iterator[float]:
    fewer, more = (
        min(ranks_per_node, k.shape.ranks_per_node * k.shape.groups) for k in (few, many)
    )
    if fewer == more:
        return
    quick, slow = curves[few].curve, curves[many].curve
    for nbytes, seconds in zip(slow.bytes, slow.seconds, strict=True):
        if quick.bytes[0] <= nbytes <= quick.bytes[-1]:
            longer = seconds / quick(nbytes)
            yield max(fewer, more / longer) if longer > 1 else math.inf
