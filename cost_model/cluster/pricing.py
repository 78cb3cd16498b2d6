"""`CollectivePricer`: times of collectives, from the best source that a cluster has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from autopar.cost_model.algorithms.extrapolate import Fabric, derive, effective_cores
from autopar.cost_model.collectives import Link
from autopar.cost_model.cost import ClusterError, Cost
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.nccl.channels import communicator_on
from autopar.cost_model.nccl.model import COLLECTIVES as NCCL_COLLECTIVES
from autopar.cost_model.nccl.model import Tuning
from autopar.cost_model.topology.link_rates import link_of_group
from autopar.cost_model.topology.topology import nics_per_node

if TYPE_CHECKING:
    import networkx as nx

NVLS = ("H100", "H200", "H800", "B200", "B300")
"""Devices with all-reduces in the switch, and over trees between nodes."""

OTHER_DTYPE_ERROR, LINK_ERROR, NCCL_MODEL_ERROR, SUBSET_ERROR = 0.1, 1.0, 0.4, 0.5
"""Relative errors added to the error bar: sums of another dtype, round figures, NCCL's model, and
other subsets of ranks of a fabric that is not uniform."""


@dataclass(frozen=True, eq=False)
class CollectivePricer:
    """Prices of collectives on a cluster; the fields are those of `Cluster`."""

    name: str
    device: str
    ranks_per_node: int
    backend: str
    curves: Mapping[CurveKey, Measured]
    uniform: bool
    topology: nx.Graph | None
    link: Link | None
    provenance: str
    _tunings: dict[GroupShape, Tuning | None] = field(default_factory=dict, init=False)
    _links: dict[GroupShape, Link | None] = field(default_factory=dict, init=False)

    def cost(self, key: CurveKey, nbytes: float) -> Cost:
        """The time from a curve, else derived, else of NCCL's model, else of round figures.

        On a fabric that is not uniform, derived times are the last resort before round figures.

        Raises:
            ClusterError: there is no source; the message says what to measure.
        """
        cost = self._measured(key, nbytes)
        if cost is None and self.uniform:
            cost = derive(self.curves, key, nbytes, self.fabric, self._nccl_seconds)
        if cost is None:
            cost = self._nccl_cost(key, nbytes)
        if cost is None and not self.uniform:
            cost = self._from_other_ranks(key, nbytes)
        if cost is None:
            cost = self._link_cost(key, nbytes)
        if cost is None and self.link is not None:
            seconds = self.link.seconds(key.collective, nbytes, key.shape.ranks, self.backend)
            cost = Cost(seconds, self.provenance, LINK_ERROR)
        if cost is None:
            raise ClusterError(self._missing(key))
        return cost

    @cached_property
    def fabric(self) -> Fabric:
        nics = 0 if self.topology is None else nics_per_node(self.topology)
        trees = self.backend == "nccl" and any(name in self.device for name in NVLS)
        cores = math.inf
        if self.device == "cpu":
            cores = effective_cores(self.curves, self.ranks_per_node)
        return Fabric(self.backend, self.ranks_per_node, nics or self.ranks_per_node, trees, cores)

    def _measured(self, key: CurveKey, nbytes: float) -> Cost | None:
        """From a curve of the same groups, of the same dtype if there is one."""
        entry = self.curves.get(key)
        if entry is not None:
            return entry.cost(nbytes)
        for other, entry in sorted(self.curves.items()):
            if (other.collective, other.shape) == (key.collective, key.shape):
                cost = entry.cost(nbytes)
                if key.collective not in ("all_reduce", "reduce_scatter"):
                    return cost
                origin = f"modelled as of {other.dtype}, {cost.provenance}"
                return Cost(cost.seconds, origin, cost.error + OTHER_DTYPE_ERROR)
        return None

    def _from_other_ranks(self, key: CurveKey, nbytes: float) -> Cost | None:
        """Derived from a measured group, although other ranks may have other links."""
        cost = derive(self.curves, key, nbytes, self.fabric)
        if cost is None:
            return None
        origin = f"{cost.provenance}, on a fabric that is not uniform"
        return Cost(cost.seconds, origin, cost.error + SUBSET_ERROR)

    def _link_cost(self, key: CurveKey, nbytes: float) -> Cost | None:
        """From the rates of the links that a group spans, where the topology is known."""
        if self.topology is None or self.backend != "nccl":
            return None
        if key.shape not in self._links:
            share = self.fabric.nic_share(key.shape)
            self._links[key.shape] = link_of_group(self.topology, key.shape, share)
        link = self._links[key.shape]
        if link is None:
            return None
        seconds = link.seconds(key.collective, nbytes, key.shape.ranks, self.backend)
        return Cost(seconds, "modelled by a ring over the links' data sheets", LINK_ERROR)

    def _nccl_cost(self, key: CurveKey, nbytes: float) -> Cost | None:
        """From NCCL's model, where its channels are known.

        The model has no all-to-all and no send. Their time is that of an all-reduce with as many
        bytes on the busiest link.
        """
        if self.backend != "nccl":
            return None
        if key.shape not in self._tunings:
            self._tunings[key.shape] = self._tuning(key.shape)
        tuning = self._tunings[key.shape]
        if tuning is None:
            return None
        if key.collective in NCCL_COLLECTIVES:
            cost = tuning.pick(key.collective, int(nbytes)).cost
            return Cost(cost.seconds, cost.provenance, NCCL_MODEL_ERROR)
        share = self.fabric.link_bytes(key.collective, key.shape)
        share /= self.fabric.link_bytes("all_reduce", key.shape)
        cost = tuning.pick("all_reduce", int(nbytes * share)).cost
        return Cost(cost.seconds, f"{cost.provenance}, of an all-reduce", 2 * NCCL_MODEL_ERROR)

    def _nccl_seconds(self, key: CurveKey, nbytes: float) -> float | None:
        cost = self._nccl_cost(key, nbytes)
        return None if cost is None else cost.seconds

    def _tuning(self, shape: GroupShape) -> Tuning | None:
        if self.topology is None:
            return None
        try:
            return Tuning.of(communicator_on(self.topology, shape, self.device))
        except ClusterError:
            return None

    def _missing(self, key: CurveKey) -> str:
        known = sorted({str(k.shape) for k in self.curves if k.collective == key.collective})
        if not known:
            return (
                f"cluster {self.name!r} has no curve of {key.collective}: measure it (autopar "
                f"measure) or import a table of it (autopar import-nccl-tests)"
            )
        why = "Its fabric is not uniform, so groups of other shapes may do otherwise"
        if self.uniform:
            why = "Times inside a node do not tell those between nodes, nor the reverse"
        return (
            f"cluster {self.name!r} has no curve of {key}, only over {'; '.join(known)}. {why}: "
            f"measure {key.collective} over {key.shape} (autopar measure, or nccl-tests and "
            f"autopar import-nccl-tests)"
        )
