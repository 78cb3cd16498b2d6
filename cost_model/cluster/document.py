"""Schema of a cluster's JSON file, and the cluster's fields from it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from autopar.core.common.documents import Amount, FieldError, Positive, Ranks, Rate, read
from autopar.cost_model.cluster.interference import Slowdown
from autopar.cost_model.collectives import Link
from autopar.cost_model.cost import KINDS, ClusterError
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.storage import Storage
from autopar.cost_model.topology.devices import Device
from autopar.cost_model.topology.topology import node_of, topology_of

AGAIN = "Measure the cluster again, or correct the field."
Name = Annotated[str, msgspec.Meta(min_length=1)]
Provenance = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(KINDS)})")]


class CurveRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One curve, as `curve_row` writes it."""

    collective: str
    ranks: Ranks
    ranks_per_node: Ranks
    groups: Ranks
    dtype: Name
    provenance: Provenance
    version: str
    bytes: tuple[Positive, ...]
    seconds: tuple[Rate, ...]
    spread: tuple[Amount, ...]

    @property
    def key(self) -> CurveKey:
        shape = GroupShape(self.ranks, self.ranks_per_node, self.groups)
        return CurveKey(self.collective, shape, self.dtype)

    @property
    def entry(self) -> Measured:
        curve = Curve(self.bytes, self.seconds, self.spread)
        return Measured(curve, self.provenance, self.version)


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node of the topology."""

    id: Name
    kind: Literal["device", "switch", "nic", "host", "fabric"]
    cpu: str | msgspec.UnsetType = msgspec.UNSET


class Edge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A link of the topology."""

    source: Name
    target: Name
    bytes_per_s: Rate
    latency_s: Amount
    provenance: Provenance


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A topology, as `topology_document` writes it."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    directed: bool
    multigraph: bool
    graph: dict[str, Any]
    machines: Ranks | None = None  # those described, if left out


class CurvePoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Points of a curve of transfers."""

    bytes: tuple[Positive, ...]
    seconds: tuple[Rate, ...]
    spread: tuple[Amount, ...]

    @property
    def curve(self) -> Curve:
        return Curve(self.bytes, self.seconds, self.spread)


class StorageRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured transfers to files or host memory, as `dataclasses.asdict` writes them."""

    write: CurvePoints
    read: CurvePoints
    provenance: Provenance
    folder: str
    on_compute: Amount = 1.0  # older documents lack factors
    beside_compute: Amount = 1.0
    both_ways: Amount = 1.0

    @property
    def entry(self) -> Storage:
        return Storage(
            self.write.curve,
            self.read.curve,
            self.provenance,
            self.folder,
            self.on_compute,
            self.beside_compute,
            self.both_ways,
        )


class ClusterDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a cluster, as `Cluster.to_dict` writes them."""

    name: Name
    device: Name
    world_size: Ranks
    ranks_per_node: Ranks
    curves: tuple[CurveRow, ...]
    backend: Name
    versions: dict[str, str]
    provenance: Provenance
    slowdown: Slowdown
    uniform: bool
    topology: Topology | None
    figures: Device | None
    link: Link | None
    device_memory_bytes: Positive | None
    host_memory_bytes: Positive | None
    schema_version: int
    storage: StorageRow | None = None  # older documents lack these
    host: StorageRow | None = None


def cluster_fields(data: Any, source: str) -> dict[str, Any]:
    """The arguments of the cluster in a document.

    Raises:
        ClusterError: a field is missing, unknown, of another type or out of range.
    """
    document = read(data, ClusterDocument, source, ClusterError, AGAIN, _check)
    values = {name: getattr(document, name) for name in ClusterDocument.__struct_fields__}
    values["curves"] = {row.key: row.entry for row in document.curves}
    values["storage"] = document.storage and document.storage.entry
    values["host"] = document.host and document.host.entry
    if document.topology is not None:
        values["topology"] = topology_of(data["topology"])
    return values


def _check(document: ClusterDocument) -> None:
    """Raises FieldError where fields contradict each other."""
    if document.ranks_per_node > document.world_size:
        raise FieldError(
            "$.ranks_per_node",
            f"is {document.ranks_per_node}, but $.world_size is {document.world_size}",
        )
    for path, row in (("$.storage", document.storage), ("$.host", document.host)):
        try:
            _ = row and row.entry
        except ClusterError as error:
            raise FieldError(path, f"has no times of transfers: {error}") from error
    seen: set[CurveKey] = set()
    for index, curve in enumerate(document.curves):
        path = f"$.curves[{index}]"
        try:
            key, _ = curve.key, curve.entry
        except ClusterError as error:
            raise FieldError(path, f"is no curve: {error}") from error
        if key in seen:
            raise FieldError(path, f"is of {key}, as one before")
        if key.shape.ranks * key.shape.groups > document.world_size:
            raise FieldError(path, f"is of {key}, more than $.world_size, {document.world_size}")
        seen.add(key)
    if document.topology is not None:
        _check_topology(document.topology)


def _check_topology(topology: Topology) -> None:
    if topology.directed or topology.multigraph:
        raise FieldError("$.topology.directed, $.topology.multigraph", "are not both false")
    names: set[str] = set()
    for index, node in enumerate(topology.nodes):
        if node.id in names:
            raise FieldError(f"$.topology.nodes[{index}].id", f"is {node.id!r}, as one before")
        names.add(node.id)
    for index, edge in enumerate(topology.edges):
        for end in (edge.source, edge.target):
            if end not in names:
                raise FieldError(f"$.topology.edges[{index}]", f"joins {end!r}, which is no node")
    if not any(node.kind == "device" for node in topology.nodes):
        raise FieldError("$.topology.nodes", "has no device")
    described = {node_of(node.id) for node in topology.nodes if node.kind == "device"}
    machines = topology.machines or len(described)
    if machines != len(described) > 1:
        raise FieldError(
            "$.topology.machines", f"is {machines}, but the nodes are of {len(described)} machines"
        )
