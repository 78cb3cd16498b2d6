"""`Cluster`: machines and the times of their collectives, as one JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.core.common.checks import (
    MAX_BYTES,
    MAX_RANKS,
    argument_error,
    choice,
    count,
    short_repr,
    text,
)
from autopar.core.common.documents import load, write_text
from autopar.cost_model.algorithms.extrapolate import Fabric
from autopar.cost_model.cluster.document import cluster_fields
from autopar.cost_model.cluster.interference import SHARED_CORES, SHARED_GPU, Slowdown
from autopar.cost_model.cluster.pricing import CollectivePricer
from autopar.cost_model.collectives import Link, Transfer, check_collective
from autopar.cost_model.cost import ClusterError, Cost, check_provenance
from autopar.cost_model.curves.measured_curve import CurveKey, Measured, curve_row
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.storage import Storage, transfer_times
from autopar.cost_model.topology.devices import Device, host_link
from autopar.cost_model.topology.topology import repeated, topology_document

if TYPE_CHECKING:
    import networkx as nx

SCHEMA_VERSION = 2

_TABLES = resources.files("autopar.cost_model.tables")

# Round figures for machines that nobody measured: gloo over loopback on a shared host, and NCCL
# over NVLink (launch 18-25 us on A100 x 8, busbw 230 GB/s: superbenchmark).
_LINKS = {"cpu": Link(2e-4, 1e-4, 2e9), "cuda": Link(1.5e-5, 2e-6, 1.5e11)}

_KINDS: Mapping[str, Any] = {
    "curves": Mapping,
    "versions": Mapping,
    "slowdown": Slowdown,
    "uniform": bool,
    "figures": Device | None,
    "link": Link | None,
    "storage": Storage | None,
    "host": Storage | None,
}


@dataclass(frozen=True)
class Cluster:
    """Machines that a plan is priced on.

    Attributes:
        name: name for people.
        device: "cpu", or the name of the GPU.
        world_size: number of ranks.
        ranks_per_node: number of ranks on each node.
        curves: times of collectives over groups, with the origin of each.
        backend: "gloo", "nccl", ...
        versions: versions of torch and the backend; where operators are modelled also "cuda", and
            the release of "torch" and the kernel of "attention": "flash-1", "flash-1-triton",
            "flash-2", "flash-3" or "cudnn".
        provenance: origin of the whole, "measured DATE on HOST" or "modelled by ...".
        slowdown: slowdown of compute and collectives by each other.
        uniform: whether groups of one shape take equally long wherever they are, as behind a
            switch. Only then are times of other shapes derived from measured ones.
        topology: devices, switches, NICs and links of every machine, or of the first of alike
            ones with their number as `topology.graph["machines"]`; None if unknown.
        figures: peak rates of a device; None if unknown.
        link: round figures for collectives without a curve; None to refuse these.
        device_memory_bytes: memory that one rank may fill, in bytes, if known.
        host_memory_bytes: memory of one node, in bytes, if known.
        storage: times of a rank's local storage; None if not measured.
        host: times of copies between a GPU and host memory; None if not measured.
        schema_version: version of the JSON document.
    """

    name: str
    device: str
    world_size: int
    ranks_per_node: int
    curves: Mapping[CurveKey, Measured]
    backend: str
    versions: Mapping[str, str]
    provenance: str
    slowdown: Slowdown
    uniform: bool = False
    topology: nx.Graph | None = field(default=None, compare=False)
    figures: Device | None = None
    link: Link | None = None
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    storage: Storage | None = None
    host: Storage | None = None
    schema_version: int = field(default=SCHEMA_VERSION)

    def __post_init__(self) -> None:
        for field_name in ("name", "device", "backend"):
            text(field_name, getattr(self, field_name), "give a name", ClusterError)
        count("world_size", self.world_size, error=ClusterError)
        count("ranks_per_node", self.ranks_per_node, error=ClusterError)
        if self.ranks_per_node > self.world_size:
            raise ClusterError(
                f"cluster {self.name!r}: {self.world_size} ranks, ranks_per_node="
                f"{self.ranks_per_node}: give at most world_size"
            )
        for field_name in ("device_memory_bytes", "host_memory_bytes"):
            if (size := getattr(self, field_name)) is not None:
                count(field_name, size, 1, MAX_BYTES, ClusterError)
        kinds = dict(_KINDS)
        if self.topology is not None:
            import networkx as nx

            kinds["topology"] = nx.Graph
        for field_name, kind in kinds.items():
            if not isinstance(value := getattr(self, field_name), kind):
                raise argument_error(field_name, value, "give what its type says", ClusterError)
        check_provenance(self.provenance)

    @classmethod
    def default(cls, world_size: int, device: str = "cpu") -> Cluster:
        """A cluster of one node with modelled figures only.

        The device is "cpu", "cuda" or the name of a GPU.
        """
        count("world_size", world_size, error=ClusterError)
        text("device", device, "give 'cpu', 'cuda' or the name of a GPU", ClusterError)
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
            slowdown=SHARED_CORES if cpu else SHARED_GPU,
            link=_LINKS["cpu" if cpu else "cuda"],
        )

    def seconds(
        self, collective: str, nbytes: float, shape: GroupShape, dtype: str = "float32"
    ) -> Cost:
        """The time of one collective of `nbytes` bytes, as `collectives` defines the size.

        Raises:
            ClusterError: it was not measured and may not be derived; the message says what to
                measure.
        """
        check_collective(collective)
        if not nbytes >= 0:
            raise ClusterError(f"{collective} of {nbytes} bytes over {shape}")
        if shape.ranks == 1:
            return Cost(0.0, "modelled by nothing to send")
        return self._pricer.cost(CurveKey(collective, shape, dtype), nbytes)

    def price(self, transfer: Transfer) -> Cost:
        """The time of one issued collective; of one of several pieces, its share of the whole."""
        nbytes = transfer.nbytes * transfer.pieces
        whole = self.seconds(transfer.collective, nbytes, transfer.shape, transfer.dtype)
        return dataclasses.replace(whole, seconds=whole.seconds / transfer.pieces)

    def transfers(self, kind: str) -> Storage:
        """Times of transfers of a kind that `storage.LANES` has, measured or modelled."""
        return self._transfer_times[kind]

    @property
    def on_gpus(self) -> bool:
        """Whether its devices are GPUs."""
        return self.device != "cpu"

    @property
    def fabric(self) -> Fabric:
        """Properties that all groups share."""
        return self._pricer.fabric

    @cached_property
    def _pricer(self) -> CollectivePricer:
        names = (f.name for f in dataclasses.fields(CollectivePricer) if f.init)
        return CollectivePricer(**{name: getattr(self, name) for name in names})

    @cached_property
    def _transfer_times(self) -> Mapping[str, Storage]:
        link = host_link(self.device, self.figures)
        return transfer_times(self.storage, self.host, link, on_gpu=self.on_gpus)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["versions"] = dict(self.versions)
        data["slowdown"] = dataclasses.asdict(self.slowdown)
        data["link"] = dataclasses.asdict(self.link) if self.link else None
        for name in ("storage", "host"):
            data[name] = dataclasses.asdict(data[name]) if data[name] else None
        data["figures"] = self.figures.to_dict() if self.figures else None
        if self.topology is not None:
            data["topology"] = topology_document(self.topology)
        data["curves"] = [curve_row(key, entry) for key, entry in sorted(self.curves.items())]
        return data

    @classmethod
    def from_dict(cls, data: Any, source: str = "the document") -> Cluster:
        """The cluster that `to_dict` wrote; `source` names the document in errors.

        Raises:
            ClusterError: a field is missing, unknown, of another type or out of range.
        """
        if not isinstance(data, Mapping) or "schema_version" not in data:
            raise ClusterError(f"{source}: this is no cluster: it has no schema_version")
        if data["schema_version"] != SCHEMA_VERSION:
            raise ClusterError(
                f"{source} has cluster schema {short_repr(data['schema_version'])} in "
                f"$.schema_version; this autopar reads {SCHEMA_VERSION}. Measure the cluster again."
            )
        return cls(**cluster_fields(data, source))

    def save(self, path: str | Path) -> None:
        """Writes the cluster as JSON.

        Raises:
            ClusterError: the file cannot be written.
        """
        write_text(path, json.dumps(self.to_dict(), indent=1) + "\n", ClusterError)

    @classmethod
    def named(cls, name: str, nodes: int | None = None) -> Cluster:
        """A cluster that ships with autopar (see `shipped_clusters`), such as "dgx-h100".

        Args:
            name: its name.
            nodes: number of machines; by default as many as were measured. Other numbers require
                a uniform fabric.
        """
        choice("name", name, shipped_clusters(), ", the clusters that ship", ClusterError)
        cluster = cls.from_dict(json.loads((_TABLES / f"{name}.json").read_text()), name)
        return cluster if nodes is None else cluster.of_nodes(nodes)

    def of_nodes(self, nodes: int) -> Cluster:
        """The cluster with another number of nodes.

        Raises:
            ClusterError: the fabric is not uniform.
        """
        count("nodes", nodes, 1, MAX_RANKS // self.ranks_per_node, ClusterError)
        if nodes * self.ranks_per_node == self.world_size:
            return self
        if not self.uniform or self.topology is None:
            raise ClusterError(
                f"{self.name} was measured with {self.world_size} ranks, and its fabric is not "
                f"uniform: what {nodes} nodes would do must be measured"
            )
        kind = self.name.partition(" x ")[2] or self.name
        return dataclasses.replace(
            self,
            name=f"{nodes} x {kind}",
            world_size=nodes * self.ranks_per_node,
            topology=repeated(self.topology, nodes),
        )

    def spanning(self, ranks: int) -> Cluster:
        """The cluster with as many nodes as `ranks` need, if its fabric tells what they do."""
        if ranks <= self.world_size or not self.uniform or self.topology is None:
            return self
        return self.of_nodes(-(-ranks // self.ranks_per_node))

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """The cluster in a file that `save` wrote, or a shipped one by its name.

        Raises:
            ClusterError: the file is no cluster; the message names the field.
        """
        if isinstance(path, str) and path in shipped_clusters() and not Path(path).exists():
            return cls.named(path)
        return cls.from_dict(load(path, "cluster", ClusterError), str(path))


@cache
def shipped_clusters() -> tuple[str, ...]:
    """The names that `Cluster.named` accepts."""
    names = (entry.name for entry in _TABLES.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))
