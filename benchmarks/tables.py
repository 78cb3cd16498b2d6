"""Makes the clusters that ship, cost_model/tables/*.json, from published tables of nccl-tests.

python -m benchmarks.tables ../shared/data/nccl_tests

A curve is a table's if there is one. A collective without one is modelled from the all-reduce over
the same groups: as long as that takes for as many bytes on the busiest link. Curves of one node
that were taken on another machine with the same board are labelled as modelled, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import networkx as nx

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cluster.interference import SHARED_GPU
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.nccl.constants import LATEST, constants_of
from autopar.cost_model.nccl.nccl_tests import NcclTestsTable, read_tables
from autopar.cost_model.topology.devices import find_device
from autopar.cost_model.topology.topology import Wire, build, hosted, meshed, switched

OUTPUT = Path(__file__).resolve().parent.parent / "cost_model" / "tables"
PER_NODE = 8
MODELLED_FROM_ALL_REDUCE = ("all_gather", "reduce_scatter", "all_to_all", "broadcast")
DOUBT = 0.25  # error bar of those: A100 tables come out within it, but for all-to-all
_LATENCIES = constants_of(LATEST)
_NAMES = f"NCCL {LATEST}'s latency of one step of LL"
_NVLINK_S, _PCI_S, _NET_S = (
    getattr(_LATENCIES, link)["ring"][0] * 1e-6 for link in ("nvlink", "pci", "net")
)
_SWITCH_S, _HOST_S, _FABRIC_S = _NVLINK_S / 2, _PCI_S / 2, _NET_S / 4  # each link of a way
_CUBE_MESH = {
    (0, 1): 1,
    (0, 2): 1,
    (0, 3): 2,
    (0, 4): 2,
    (1, 2): 2,
    (1, 3): 1,
    (1, 5): 2,
    (2, 3): 2,
    (2, 6): 1,
    (3, 7): 1,
    (4, 5): 1,
    (4, 6): 1,
    (4, 7): 2,
    (5, 6): 2,
    (5, 7): 1,
    (6, 7): 2,
}
"""NVLinks between the GPUs of a DGX-1 with V100 (NVIDIA's DGX-1 white paper, hybrid cube mesh)."""


def wire(gigabytes_per_s: float, latency_s: float, source: str) -> Wire:
    """A link whose bandwidth is of a data sheet."""
    return Wire(gigabytes_per_s * 1e9, latency_s, f"imported from {source}; latency: {_NAMES}")


@dataclass(frozen=True)
class Machine:
    """A cluster that ships.

    Attributes:
        name: of the cluster.
        device: as torch calls it.
        nodes: as many as were measured.
        topology: of these.
        tables: names of the files of what was measured on it.
        same_board: names of files measured on one node of another machine with the same board.
        uniform: see `Cluster`.
    """

    name: str
    device: str
    nodes: int
    topology: nx.Graph
    tables: Sequence[str]
    same_board: Sequence[str] = ()
    uniform: bool = True


_A100_NODE = tuple(
    f"a100_40g_1x8_nvswitch_{name}"
    for name in ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast")
)
_H100_NODE = ("dgxh100_1x8_nvls_allreduce",)
_NVSWITCH_A100 = switched(wire(300, _SWITCH_S, "NVIDIA A100 data sheet: NVLink 600 GB/s both ways"))
_NVSWITCH_H100 = switched(wire(450, _SWITCH_S, "NVIDIA H100 data sheet: NVLink 900 GB/s both ways"))

MACHINES = (
    Machine(
        "dgx-a100",
        "NVIDIA A100-SXM4-40GB",
        2,
        build(
            2,
            8,
            _NVSWITCH_A100,
            8,
            wire(25, _FABRIC_S, "DGX A100 data sheet: 8 x 200 Gbit/s HDR"),
            cpu="amd",
        ),
        ("dgxa100_2x8_ib_hdr_allreduce",),
        _A100_NODE,
    ),
    Machine(
        "dgx-h100",
        "NVIDIA H100 80GB HBM3",
        1,
        build(
            1,
            8,
            _NVSWITCH_H100,
            8,
            wire(50, _FABRIC_S, "DGX H100 data sheet: 8 x 400 Gbit/s NDR"),
        ),
        _H100_NODE,
    ),
    Machine(
        "aws-p5",
        "NVIDIA H100 80GB HBM3",
        2,
        build(
            2,
            8,
            _NVSWITCH_H100,
            32,
            wire(12.5, _FABRIC_S, "AWS p5.48xlarge: 32 x 100 Gbit/s EFA"),
            cpu="amd",
        ),
        ("aws_p5_h100_2x8_efa_allreduce",),
        _H100_NODE,
    ),
    Machine(
        "gcp-a3mega",
        "NVIDIA H100 80GB HBM3",
        2,
        build(2, 8, _NVSWITCH_H100, 8, wire(25, _FABRIC_S, "GCP a3-megagpu-8g: 8 x 200 Gbit/s")),
        ("gcp_a3mega_h100_2x8_tcpxo_allreduce", "gcp_a3mega_h100_2x8_tcpxo_allgather"),
        _H100_NODE,
    ),
    Machine(
        "8x4090-pcie",
        "NVIDIA GeForce RTX 4090",
        1,
        build(1, 8, hosted(wire(32, _HOST_S, "PCIe 4.0 x16"))),
        ("rtx4090_1x8_pcie_nop2p_allreduce",),
        uniform=False,
    ),
    Machine(
        "dgx1v-roce",
        "Tesla V100-SXM2-32GB",
        2,
        build(
            2,
            8,
            [
                meshed(_CUBE_MESH, wire(25, _NVLINK_S, "DGX-1 white paper: NVLink 25 GB/s a link")),
                hosted(wire(16, _HOST_S, "PCIe 3.0 x16")),
            ],
            2,
            wire(12.5, _FABRIC_S, "the table's header: 2 x 100 Gbit/s RoCE"),
            nic_at="host",
        ),
        ("dgx1v_2x8_roce100_allreduce",),
        uniform=False,
    ),
)


def cluster(machine: Machine, tables: Mapping[str, NcclTestsTable]) -> Cluster:
    """The cluster of one machine: its curves, and what is modelled from them."""
    curves = {tables[name].key: tables[name].measured() for name in machine.tables}
    for name in machine.same_board:
        table = tables[name]
        entry = table.measured()
        origin = f"modelled as another machine with the same board, {entry.provenance}"
        curves.setdefault(table.key, replace(entry, provenance=origin))
    figures = find_device(machine.device)
    made = Cluster(
        name=machine.name,
        device=machine.device,
        world_size=machine.nodes * PER_NODE,
        ranks_per_node=PER_NODE,
        curves=curves,
        backend="nccl",
        versions={},
        provenance="imported from " + "; ".join(tables[name].source for name in machine.tables),
        slowdown=SHARED_GPU,
        uniform=machine.uniform,
        topology=machine.topology,
        figures=figures,
        device_memory_bytes=figures.memory_bytes if figures else None,
    )
    return replace(made, curves={**modelled(made), **curves})


def modelled(cluster: Cluster) -> dict[CurveKey, Measured]:
    """The collectives without a curve, from the all-reduce over the same groups."""
    made = {}
    for key, entry in cluster.curves.items():
        if key.collective != "all_reduce":
            continue
        pair = GroupShape(2, 2 if key.shape.nodes == 1 else 1)
        shapes = {**dict.fromkeys(MODELLED_FROM_ALL_REDUCE, key.shape), "send": pair}
        for collective, shape in shapes.items():
            share = cluster.fabric.link_bytes(collective, shape)
            share /= cluster.fabric.link_bytes("all_reduce", key.shape)
            sizes = entry.curve.bytes
            seconds = [entry.curve(size * share) for size in sizes]
            spread = [2 * DOUBT * time for time in seconds]
            origin = (
                f"modelled from the all_reduce by bytes on the busiest link, {entry.provenance}"
            )
            curve = Curve.smooth(sizes, seconds, spread)
            made[CurveKey(collective, shape, key.dtype)] = Measured(curve, origin, entry.version)
    return made


def main() -> None:
    """Write every cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the CSV tables")
    options = parser.parse_args()
    tables = {path.stem: read_tables(path)[0] for path in options.folder.glob("*.csv")}
    OUTPUT.mkdir(exist_ok=True)
    for machine in MACHINES:
        cluster(machine, tables).save(OUTPUT / f"{machine.name}.json")
        print(OUTPUT / f"{machine.name}.json")


if __name__ == "__main__":
    main()
