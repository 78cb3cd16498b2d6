"""`Prices`: what a cluster answers when asked for the time of a collective, and from what."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

from autopar.cost_model.algorithms.extrapolate import Fabric, derive, effective_cores
from autopar.cost_model.cost import ClusterError, Cost
from autopar.cost_model.curves.measured_curve import CurveKey
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.nccl.channels import communicator_on
from autopar.cost_model.nccl.model import COLLECTIVES as NCCL_COLLECTIVES
from autopar.cost_model.nccl.model import Tuning
from autopar.cost_model.topology.topology import node_of

if TYPE_CHECKING:
    from autopar.cost_model.cluster.cluster import Cluster

NVLS = ("H100", "H200", "H800", "B200", "B300")
"""Devices whose all-reduces NCCL runs in the switch, and over trees between nodes."""

SUMS_ERROR, LINK_ERROR, PRIOR_ERROR = 0.1, 1.0, 0.4
"""Added to error bars: sums of another dtype; round figures; NCCL's model, which errs by 13 to 65 %
(cost_models.md 0.2)."""


class Prices:
    """The times of a cluster's collectives, from the best of what it knows.

    Attributes:
        cluster: whose.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._tunings: dict[GroupShape, Tuning | None] = {}

    def cost(self, key: CurveKey, nbytes: float) -> Cost:
        """Measured, derived, NCCL's own, of round figures; `ClusterError` if none of these."""
        cost = self._measured(key, nbytes)
        if cost is None and self.cluster.uniform:
            cost = derive(self.cluster.curves, key, nbytes, self.fabric, self._prior_seconds)
        if cost is None:
            cost = self._prior(key, nbytes)
        if cost is None and (link := self.cluster.link) is not None:
            seconds = link.seconds(key.collective, nbytes, key.shape.ranks, self.cluster.backend)
            cost = Cost(seconds, self.cluster.provenance, LINK_ERROR)
        if cost is None:
            raise ClusterError(self._missing(key))
        return cost

    @cached_property
    def fabric(self) -> Fabric:
        """What the groups have in common."""
        cluster = self.cluster
        nics = cluster.ranks_per_node
        if cluster.topology is not None:
            kinds = cluster.topology.nodes(data="kind")
            nics = sum(kind == "nic" and node_of(name) == "node0" for name, kind in kinds) or nics
        trees = cluster.backend == "nccl" and any(name in cluster.device for name in NVLS)
        cores = math.inf
        if cluster.device == "cpu":
            cores = effective_cores(cluster.curves, cluster.ranks_per_node)
        return Fabric(cluster.backend, cluster.ranks_per_node, nics, trees, cores)

    def _measured(self, key: CurveKey, nbytes: float) -> Cost | None:
        """From a curve of these groups, if need be of another dtype: bytes are bytes."""
        entry = self.cluster.curves.get(key)
        if entry is not None:
            return entry.cost(nbytes)
        for other, entry in sorted(self.cluster.curves.items()):
            if (other.collective, other.shape) == (key.collective, key.shape):
                cost = entry.cost(nbytes)
                if key.collective not in ("all_reduce", "reduce_scatter"):
                    return cost
                origin = f"modelled as of {other.dtype}, {cost.provenance}"
                return Cost(cost.seconds, origin, cost.error + SUMS_ERROR)
        return None

    def _prior(self, key: CurveKey, nbytes: float) -> Cost | None:
        """What NCCL believes, where it is NCCL's to run and its graphs are known.

        It has no model of all-to-alls and messages: these last as long as an all-reduce over the
        same groups with as many bytes on the busiest link.
        """
        if self.cluster.backend != "nccl":
            return None
        if key.shape not in self._tunings:
            self._tunings[key.shape] = self._tuning(key.shape)
        tuning = self._tunings[key.shape]
        if tuning is None:
            return None
        if key.collective in NCCL_COLLECTIVES:
            cost = tuning.pick(key.collective, int(nbytes)).cost
            return Cost(cost.seconds, cost.provenance, PRIOR_ERROR)
        share = self.fabric.link_bytes(key.collective, key.shape)
        share /= self.fabric.link_bytes("all_reduce", key.shape)
        cost = tuning.pick("all_reduce", int(nbytes * share)).cost
        return Cost(cost.seconds, f"{cost.provenance}, of an all-reduce", 2 * PRIOR_ERROR)

    def _prior_seconds(self, key: CurveKey, nbytes: float) -> float | None:
        cost = self._prior(key, nbytes)
        return None if cost is None else cost.seconds

    def _tuning(self, shape: GroupShape) -> Tuning | None:
        if self.cluster.topology is None:
            return None
        try:
            return Tuning.of(communicator_on(self.cluster.topology, shape, self.cluster.device))
        except ClusterError:
            return None

    def _missing(self, key: CurveKey) -> str:
        name, curves = self.cluster.name, self.cluster.curves
        known = sorted({str(k.shape) for k in curves if k.collective == key.collective})
        if not known:
            return (
                f"cluster {name!r} has no curve of {key.collective}: measure it (autopar measure) "
                f"or import a table of it (autopar import-nccl-tests)"
            )
        why = "Its fabric is not uniform, so groups of other shapes may do otherwise"
        if self.cluster.uniform:
            why = "What lies between nodes cannot be told from inside one, nor the reverse"
        return (
            f"cluster {name!r} has no curve of {key}, only over {'; '.join(known)}. {why}: measure "
            f"{key.collective} over {key.shape} (autopar measure, or nccl-tests and autopar "
            f"import-nccl-tests)"
        )
