"""`Cluster`: the machines as the cost model knows them, measured or modelled, as one JSON file."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.cost_model.collectives import Link, check_collective, ring
from autopar.cost_model.cost import KINDS, ClusterError, Cost
from autopar.cost_model.curves import Curve

SCHEMA_VERSION = 1

# Round figures of a machine of each kind, used where nothing was measured: gloo over loopback on
# a shared host, NCCL over NVLink (launch 18-25 us on A100 x 8, busbw 230 GB/s: superbenchmark).
_LINKS = {"cpu": Link(2e-4, 1e-4, 2e9), "cuda": Link(1.5e-5, 2e-6, 1.5e11)}


@dataclass(frozen=True)
class Cluster:
    """What a plan is priced on.

    Attributes:
        name: how a person calls it.
        device: "cpu", or the name of the GPU.
        world_size: number of ranks.
        ranks_per_node: number of ranks on each node.
        curves: the measured curve of (collective, ranks). Groups of fewer ranks than the world
            are of consecutive ranks and were measured side by side, as the axes of a mesh run.
        backend: "gloo", "nccl", ...
        versions: of torch and the backend.
        provenance: where the curves come from, "measured DATE on HOST" or "modelled by ...".
        overlap: fraction of communication that can hide behind compute: 1 if they share nothing,
            0 if they use the same cores.
        overlap_provenance: where that figure comes from.
        link: for collectives without a curve; None means they cannot be priced.
        device_memory_bytes: memory that one rank may fill, if known.
        host_memory_bytes: memory of one node, if known.
        schema_version: of this record.
    """

    name: str
    device: str
    world_size: int
    ranks_per_node: int
    curves: Mapping[tuple[str, int], Curve]
    backend: str
    versions: Mapping[str, str]
    provenance: str
    overlap: float
    overlap_provenance: str
    link: Link | None = None
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    schema_version: int = field(default=SCHEMA_VERSION)

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 1 <= self.ranks_per_node <= self.world_size:
            raise ClusterError(
                f"cluster {self.name!r}: {self.world_size} ranks, {self.ranks_per_node} a node"
            )
        if not 0 <= self.overlap <= 1:
            raise ClusterError(f"cluster {self.name!r}: overlap {self.overlap} is not in 0..1")
        for text in (self.provenance, self.overlap_provenance):
            if not text.startswith(KINDS):
                raise ClusterError(f"provenance {text!r} starts with none of {KINDS}")
        for collective, _ in self.curves:
            check_collective(collective)

    @classmethod
    def default(cls, world_size: int, device: str = "cpu") -> Cluster:
        """A cluster of one node of which nothing was measured: every figure is modelled.

        Args:
            world_size: number of ranks.
            device: "cpu", "cuda" or the name of a GPU.
        """
        cpu = device == "cpu"
        return cls(
            name=f"{world_size} x {device}, not measured",
            device=device,
            world_size=world_size,
            ranks_per_node=world_size,
            curves={},
            backend="gloo" if cpu else "nccl",
            versions={},
            provenance="modelled by a ring over round figures (Cluster.default)",
            overlap=0.0 if cpu else 1.0,
            overlap_provenance="modelled by " + ("shared cores" if cpu else "separate engines"),
            link=_LINKS["cpu" if cpu else "cuda"],
        )

    def seconds(self, collective: str, nbytes: float, ranks: int) -> Cost:
        """The time of one collective.

        Args:
            collective: one of `collectives.COLLECTIVES`.
            nbytes: message size in bytes, as `collectives` defines it for each.
            ranks: number of ranks that take part.
        """
        check_collective(collective)
        if ranks < 1 or not nbytes >= 0:
            raise ClusterError(f"{collective} of {nbytes} bytes over {ranks} ranks")
        if ranks == 1:
            return Cost(0.0, "modelled by nothing to send")
        curve = self.curves.get((collective, ranks))
        if curve is not None:
            return Cost(curve(nbytes), self.provenance)
        known = [n for name, n in self.curves if name == collective]
        if known:
            return self._rescaled(collective, nbytes, ranks, known)
        if self.link is not None:
            seconds = self.link.seconds(collective, nbytes, ranks, self.backend)
            return Cost(seconds, self.provenance)
        raise ClusterError(
            f"cluster {self.name!r} has no curve of {collective}: run autopar.measure with it "
            f"among the collectives"
        )

    def _rescaled(self, collective: str, nbytes: float, ranks: int, known: list[int]) -> Cost:
        """The nearest measured group's curve, its latency scaled by steps, the rest by bytes sent.

        True where the fabric is uniform: 3.6 % off from 4 to 8 A100 behind NVSwitch.
        """
        near = min(known, key=lambda n: (abs(math.log(n / ranks)), -n))
        curve = self.curves[collective, near]
        steps, share = ring(collective, ranks, self.backend)
        near_steps, near_share = ring(collective, near, self.backend)
        whole = curve(nbytes)
        latency = min(whole, curve.pieces[0].latency_s)
        seconds = latency * steps / near_steps + (whole - latency) * share / near_share
        return Cost(seconds, f"modelled by ring scaling from {near} ranks, {self.provenance}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["versions"] = dict(self.versions)
        data["link"] = dataclasses.asdict(self.link) if self.link else None
        data["curves"] = [
            {"collective": collective, "ranks": ranks, **curve.to_dict()}
            for (collective, ranks), curve in sorted(self.curves.items())
        ]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """The cluster that `to_dict` wrote; anything else is refused."""
        if not isinstance(data, Mapping) or "schema_version" not in data:
            raise ClusterError("this is no cluster: it has no schema_version")
        if data["schema_version"] != SCHEMA_VERSION:
            raise ClusterError(
                f"this cluster has schema {data['schema_version']!r}, this autopar reads "
                f"{SCHEMA_VERSION}: measure it again"
            )
        names = {f.name for f in dataclasses.fields(cls)}
        odd = sorted(names.symmetric_difference(data))
        if odd:
            raise ClusterError(f"this is no cluster: unknown or missing {', '.join(odd)}")
        try:
            curves = {(row["collective"], row["ranks"]): _curve(row) for row in data["curves"]}
            link = None if data["link"] is None else Link(**data["link"])
            return cls(**{**data, "curves": curves, "link": link})
        except (KeyError, TypeError) as error:
            raise ClusterError(f"this cluster is damaged: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the cluster as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster that `save` wrote."""
        try:
            data = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ClusterError(f"{path} is not JSON: {error}") from error
        try:
            return cls.from_dict(data)
        except ClusterError as error:
            raise ClusterError(f"{path}: {error}") from error


def _curve(row: Mapping[str, Any]) -> Curve:
    return Curve.from_dict({k: v for k, v in row.items() if k not in ("collective", "ranks")})
