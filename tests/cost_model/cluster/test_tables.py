"""The clusters that ship."""

import tomllib
from dataclasses import replace
from importlib import resources
from itertools import product
from pathlib import Path

import pytest

from autopar.core.ir.messages import COLLECTIVES, READ, TO_HOST
from autopar.cost_model.cluster.cluster import Cluster, shipped_clusters
from autopar.cost_model.cost import ClusterError, Cost
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.storage import COPIES, UNMEASURED
from autopar.cost_model.topology.devices import DEVICES, find_device
from autopar.cost_model.topology.link_rates import link_of_group
from autopar.cost_model.topology.topology import machine_count
from tests.cost_model.machines import every_machine

ROOT = Path(__file__).resolve().parents[3]
NAMES = (
    "8x4090-pcie", "aws-p5", "dgx-a100", "dgx-b200", "dgx-h100", "dgx-h200", "dgx1v-roce",
    "gb200-nvl72", "gcp-a3mega", "h100-eth400", "l40s-eth100", "mi300x-eth400",
)  # fmt: skip
NOT_UNIFORM = ("8x4090-pcie", "dgx1v-roce")


def test_they_are_package_data():
    assert shipped_clusters() == NAMES
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "*.json" in setup["package-data"]["autopar.cost_model.tables"]
    files = resources.files("autopar.cost_model.tables")
    assert all(files.joinpath(f"{name}.json").is_file() for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name):
    cluster = Cluster.load(name)
    assert cluster.name == name
    assert cluster.provenance.startswith("imported from ")
    for key, entry in cluster.curves.items():
        assert "imported from " in entry.provenance, key
    assert replace(find_device(cluster.device), host_bytes_per_s=None) == cluster.figures
    assert cluster.figures.source.startswith("imported from ")
    assert all(p for _, _, p in cluster.topology.edges(data="provenance"))


@pytest.mark.parametrize("name", NAMES)
def test_all_collectives_over_what_was_measured_have_a_price(name):
    cluster = Cluster.named(name)
    whole = GroupShape(cluster.world_size, cluster.ranks_per_node)
    kinds = {}
    for collective in COLLECTIVES:
        shape = GroupShape(2, 1 if whole.nodes > 1 else 2) if collective == "send" else whole
        costs = [cluster.seconds(collective, n, shape) for n in (1e3, 1e6, 1e9)]
        assert [c.seconds for c in costs] == sorted(c.seconds for c in costs)
        kinds[collective] = costs[-2].kind
    assert kinds["all_reduce"] in ("imported", "modelled")  # dgx1v from 8 MB on only
    assert kinds["send"] == "modelled"


def price(cluster: Cluster, collective: str, nbytes: float, shape: GroupShape) -> Cost | str:
    try:
        return cluster.seconds(collective, nbytes, shape)
    except ClusterError as error:
        return str(error)


@pytest.mark.parametrize("nodes", [2, 5, 64])
@pytest.mark.parametrize("name", [each for each in NAMES if each not in NOT_UNIFORM])
def test_the_first_of_alike_machines_prices_as_all_of_them(name, nodes):
    cluster = Cluster.named(name, nodes)
    whole = replace(cluster, topology=every_machine(cluster.topology))
    node, ranks = cluster.ranks_per_node, cluster.world_size
    shapes = [
        *(GroupShape(node, node), GroupShape(2, 2, node // 2), GroupShape(nodes, 1, node)),
        *(GroupShape(ranks, node), GroupShape(ranks // 2, node // 2, 2), GroupShape(2, 1)),
        GroupShape(2 * node, node, nodes // 2),
        GroupShape(2 * ranks, node),  # larger than the cluster
    ]
    assert whole.fabric == cluster.fabric
    for collective, shape, n in product(COLLECTIVES, shapes, (1e3, 1e6, 1e9)):
        assert price(cluster, collective, n, shape) == price(whole, collective, n, shape)
        link = link_of_group(cluster.topology, shape, 0.5)
        assert link == link_of_group(whole.topology, shape, 0.5)


def test_a_large_cluster_costs_what_one_machine_does(tmp_path):
    cluster = Cluster.named("dgx-h100", nodes=16384)
    assert cluster.world_size == 131072
    assert len(cluster.topology) == len(Cluster.named("dgx-h100", nodes=2).topology)
    cluster.save(tmp_path / "cluster.json")
    loaded = Cluster.load(tmp_path / "cluster.json")
    assert machine_count(loaded.topology) == 16384
    everyone = GroupShape(131072, 8)
    assert loaded.seconds("all_reduce", 1e9, everyone) == cluster.seconds(
        "all_reduce", 1e9, everyone
    )
    document = cluster.to_dict()
    document["topology"]["nodes"] += [{"id": "node1/gpu0", "kind": "device"}]
    with pytest.raises(ClusterError, match=r"machines.* is 16384, but the nodes are of 2 machines"):
        Cluster.from_dict(document)


@pytest.mark.slow
def test_large_ones_where_the_fabric_is_uniform():
    large = Cluster.named("dgx-h100", nodes=128)
    assert (large.world_size, large.name) == (1024, "128 x dgx-h100")
    wide = large.seconds("all_reduce", 2**30, GroupShape(1024, 8))
    assert wide.kind == "modelled"
    assert "NCCL" in wide.provenance
    p5 = Cluster.named("aws-p5", nodes=4)
    pair, four = (p5.seconds("all_reduce", 2**30, GroupShape(n, 8)) for n in (16, 32))
    assert pair.seconds < four.seconds < 2 * pair.seconds
    assert "from 16 ranks" in four.provenance
    assert four.error > pair.error
    small = Cluster.named("dgx-a100", nodes=1)
    assert small.seconds("all_reduce", 2**30, GroupShape(4, 4)).kind == "modelled"


def test_others_are_refused():
    with pytest.raises(ClusterError, match="its fabric is not uniform"):
        Cluster.named("dgx1v-roce", nodes=4)
    with pytest.raises(ClusterError, match="choose 8x4090-pcie, aws-p5"):
        Cluster.named("dgx-b300")


@pytest.mark.parametrize("name", shipped_clusters())
def test_every_group_has_a_labelled_price(name):
    cluster = Cluster.named(name)
    nodes, near = cluster.world_size // cluster.ranks_per_node, cluster.ranks_per_node
    here = [n for n in (1, 2, 4, 8) if n <= near]
    shapes = [GroupShape(n * m, n) for n in here for m in (1, nodes) if n * m > 1]
    shapes += [GroupShape(n, n, near // n) for n in here if n > 1]
    for shape in shapes:
        for collective in COLLECTIVES:
            cost = cluster.seconds(collective, 1e6, shape)
            assert 0 < cost.seconds < 1
            assert cost.kind in ("measured", "imported", "modelled")


def test_devices_by_the_names_that_torch_gives():
    assert find_device("NVIDIA A100-SXM4-80GB").memory_bytes == 80 * 10**9
    assert find_device("NVIDIA H100 80GB HBM3").flops_per_s["bfloat16"] == 989.4e12
    assert find_device("NVIDIA GeForce RTX 4090").flops_per_s["bfloat16"] == 165.2e12
    assert find_device("cpu") is None


@pytest.mark.parametrize(
    ("name", "rate"), [("dgx-a100", 24.8e9), ("dgx-h100", 49.6e9), ("gb200-nvl72", 174.4e9)]
)
def test_copies_of_host_memory_are_modelled_from_the_link(name, rate):
    cluster, nbytes = Cluster.named(name), 1 << 30
    for kind in COPIES:
        times = cluster.transfers(kind)
        cost = times.seconds(kind, nbytes)
        assert cost.seconds == pytest.approx(1e-5 + nbytes / rate, rel=1e-3)
        assert cost.provenance.startswith("modelled by")
        assert times.both_ways == 1.42
    files = cluster.transfers(READ).seconds(READ, nbytes)
    alone = UNMEASURED.seconds(READ, nbytes).seconds
    assert files.seconds == pytest.approx(alone + nbytes / rate, rel=0.01)
    assert files.kind == "modelled"


def test_every_device_has_a_link_to_its_host():
    assert {device.host_bytes_per_s for device in DEVICES} == {16e9, 32e9, 64e9, 225e9}
    unknown = Cluster.default(2, "cuda").transfers(TO_HOST)
    assert "PCIe 3.0 x16, because the device is unknown" in unknown.provenance
    assert unknown.seconds(TO_HOST, 1 << 30).seconds == pytest.approx((1 << 30) / 12.4e9, rel=1e-3)
