"""NCCL's tuning model: figures worked out by hand, published tables, versions."""

from statistics import mean

import pytest

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves.measured_curve import CurveKey
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.nccl.channels import Communicator, Graph, behind_switch, communicator_on
from autopar.cost_model.nccl.constants import constants_of
from autopar.cost_model.nccl.model import Tuning
from tests.cost_model.machines import machines

A100 = Graph(12, 20, 20)
DGX_A100 = Graph(8, 24, 24)
H100 = Graph(12, 30, 30, plain_tree=True)
NVLS = Graph(16, 20, 40)
PCIE = Graph(1, 15, 15, path_intra="SYS")

ONE_A100 = Communicator(8, 1, 80, {"ring": A100, "tree": A100}, "amd")
TWO_A100 = Communicator(16, 2, 80, {"ring": DGX_A100, "tree": DGX_A100}, "amd")
ONE_H100 = Communicator(8, 1, 90, {"ring": H100, "tree": H100, "nvls": NVLS})
ONE_4090 = Communicator(8, 1, 89, {"ring": PCIE, "tree": PCIE}, "amd")


def test_a_ring_by_hand():
    """LL on 8 A100: 6.6 + 14 x 0.6 us; min(87.7, 240 / 2) GB/s on the bus, x 8/14."""
    tuning = Tuning.of(ONE_A100, "2.30")
    assert tuning.latency("all_reduce", "ring", "ll") == pytest.approx(15.0)
    assert tuning.bandwidth("all_reduce", "ring", "ll") == pytest.approx(87.7 * 8 / 14)
    seconds = tuning.seconds("all_reduce", 1 << 20, "ring", "simple")
    assert seconds == pytest.approx((8.4 + 14 * 3.4 + 2**20 / 1000 / (240 * 8 / 14)) * 1e-6)


def test_a_tree_by_hand():
    """Simple on 2 x 8 A100 at 1 MiB: 8.4 + 2 (7 x 4 + 14) us; 176.64 / 2 GB/s x 0.5."""
    tuning = Tuning.of(TWO_A100)
    assert tuning.latency("all_reduce", "tree", "simple") == pytest.approx(92.4)
    assert tuning.bandwidth("all_reduce", "tree", "simple") == pytest.approx(88.32)
    seconds = tuning.seconds("all_reduce", 1 << 20, "tree", "simple")
    assert seconds == pytest.approx((92.4 + 2**20 / 1000 / (88.32 * 0.5)) * 1e-6)


def test_a_ring_over_the_network_by_hand():
    """LL128 on 2 x 8 A100: 14 + 28 max(1.9, 2) + 2 x 4 us; Simple's plateau is x 1.4."""
    tuning = Tuning.of(TWO_A100)
    assert tuning.latency("all_reduce", "ring", "ll128") == pytest.approx(14 + 56 + 8)
    small, large = (tuning.seconds("all_reduce", n, "ring", "simple") for n in (8191, 8192))
    latency = 8.4 + 28 * 6 + 2 * 14
    assert small == pytest.approx((latency + 8.191 / (192 * 16 / 30)) * 1e-6)
    assert large == pytest.approx((1.4 * latency + 8.192 / (192 * 16 / 30)) * 1e-6)


def test_nvls_by_hand():
    """8 H100: 25 us; 16 channels of 20 x 0.85 x 15/16 x 2 GB/s, x 8/14."""
    tuning = Tuning.of(ONE_H100)
    assert tuning.latency("all_reduce", "nvls", "simple") == 25
    assert tuning.bandwidth("all_reduce", "nvls", "simple") == pytest.approx(510 * 8 / 14)


def test_the_pick_goes_from_latency_to_bandwidth():
    tuning = Tuning.of(TWO_A100)
    picks = [tuning.pick("all_reduce", 1 << power) for power in (10, 20, 30)]
    assert [(p.algorithm, p.protocol) for p in picks] == [
        ("tree", "ll"),
        ("tree", "ll128"),
        ("ring", "simple"),
    ]
    assert [p.channels for p in picks] == [1, 16, 16]
    assert all(p.cost.provenance.startswith("modelled by NCCL 2.30.3") for p in picks)
    assert Tuning.of(ONE_4090).seconds("all_reduce", 1 << 20, "ring", "ll128") is None


@pytest.mark.parametrize(
    ("name", "collective", "communicator", "all_sizes", "large"),
    [
        ("dgx-a100", "all_reduce", ONE_A100, 0.395, 0.06),
        ("dgx-a100", "all_gather", ONE_A100, 0.50, None),
        ("dgx-a100", "reduce_scatter", ONE_A100, 0.50, None),
        ("dgx-h100", "all_reduce", ONE_H100, 0.13, None),
        ("dgx-a100", "all_reduce", TWO_A100, 0.30, 0.03),
        ("8x4090-pcie", "all_reduce", ONE_4090, 0.31, None),
    ],
)
def test_errors_on_published_tables(name, collective, communicator, all_sizes, large):
    """As another implementation of the model erred on them, with the graphs assumed there."""
    shape = GroupShape(communicator.ranks, communicator.per_node)
    curve = Cluster.named(name).curves[CurveKey(collective, shape)].curve
    tuning = Tuning.of(communicator)
    errors = {
        nbytes: abs(tuning.pick(collective, nbytes).cost.seconds / seconds - 1)
        for nbytes, seconds in zip(curve.bytes, curve.seconds, strict=True)
    }
    assert mean(errors.values()) == pytest.approx(all_sizes, abs=0.015)
    if large is not None:
        big = [error for nbytes, error in errors.items() if nbytes > 16 << 20]
        assert mean(big) == pytest.approx(large, abs=0.01)


def test_the_search_behind_a_switch_finds_what_is_known():
    """DGX A100 and p4d, and DGX H100 on one node: reference/cost_models.md 0.2."""
    one, two = GroupShape(8, 8), GroupShape(16, 8)
    assert behind_switch(one, 80, 240)["ring"] == A100
    assert behind_switch(two, 80, 240, 8, 24)["ring"] == DGX_A100
    assert behind_switch(two, 80, 240, 4, 12)["ring"] == Graph(4, 12, 12)
    assert behind_switch(one, 90, 18 * 20.6)["tree"] == H100
    assert behind_switch(one, 90, 18 * 20.6)["nvls"] == NVLS
    graph = machines(2, 8, 300e9, 8, 25e9, cpu="amd")
    assert communicator_on(graph, two, "NVIDIA A100-SXM4-40GB") == TWO_A100
    efa = machines(2, 8, 300e9, 32, 12.5e9)
    assert communicator_on(efa, two, "NVIDIA A100-SXM4-40GB").graphs["ring"] == Graph(16, 15, 15)
    with pytest.raises(ClusterError, match="not known, only behind NVSwitches"):
        communicator_on(machines(1, 8, 300e9, hub=""), one, "Tesla V100-SXM2-32GB")


def test_versions():
    """What is known to differ; what is not known is refused."""
    old, new = Tuning.of(ONE_A100, "2.20.5"), Tuning.of(ONE_A100, "2.30.7")
    assert new.bandwidth("all_reduce", "ring", "ll") > old.bandwidth("all_reduce", "ring", "ll")
    assert old.latency("all_reduce", "tree", "simple") == pytest.approx(2 * 7 * 28)
    assert constants_of("2.27.5").name == "2.27"
    assert constants_of("nccl 2.28.9+cuda13.0").net["nvls_tree"][2] == 20.9
    assert constants_of("2.28.3").net["nvls_tree"][2] == 14
    assert constants_of("2.29.2").nvls_tree["blackwell"] == (0, 96, 43.8)
    for unknown in ("2.18.1", "2.22.3", "2.31.0"):
        with pytest.raises(ClusterError, match=f"NCCL {unknown} are not known"):
            constants_of(unknown)
    with pytest.raises(ClusterError, match="no NCCL version"):
        constants_of("gloo")
