import dataclasses
import pickle

import networkx as nx
import pytest

from autopar.core.ir.messages import COLLECTIVES, FROM_HOST, TO_HOST
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cluster.interference import Slowdown
from autopar.cost_model.collectives import ring
from autopar.cost_model.cost import ClusterError, Cost
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.storage import Storage
from autopar.cost_model.topology.devices import DEVICES, Device
from tests.cost_model.machines import machines

TODAY = "measured 2026-11-21 on here"
PAIR, FOUR = GroupShape(2, 2), GroupShape(4, 4)


def measured(curve):
    return Measured(curve, TODAY, "gloo, torch 2.13.0")


MEASURED = Cluster(
    name="four ranks",
    device="cpu",
    world_size=4,
    ranks_per_node=4,
    curves={
        CurveKey("all_reduce", PAIR): measured(
            Curve((1000, 1_000_000), (1e-3, 1e-2), (1e-4, 1e-4))
        ),
        CurveKey("all_reduce", FOUR): measured(Curve((1000, 1_000_000), (2e-3, 3e-2))),
    },
    backend="gloo",
    versions={"torch": "2.13.0"},
    provenance=TODAY,
    slowdown=Slowdown((1000, 8000), (1.2, 1.5), (1.0, 2.0), 1e-5, 1e-6, TODAY),
    uniform=True,
    topology=machines(1, 4, 1e9),
    figures=Device("a CPU", 2**34, 2e10, {"float32": 1e11}, TODAY),
)
HOST = Storage(
    Curve((1000,), (1e-5,), (1e-6,)), Curve((1000,), (2e-5,)), TODAY, "", 1.01, 1.02, 1.5
)


def test_measured_curves_answer_as_measured():
    cost = MEASURED.seconds("all_reduce", 1000, FOUR)
    assert cost == Cost(pytest.approx(2e-3), TODAY)


def test_other_group_sizes_are_modelled_from_the_nearest_curve():
    cost = MEASURED.seconds("all_reduce", 1_000_000, GroupShape(3, 3))
    assert cost.kind == "modelled"
    assert "from 4 ranks" in cost.provenance
    assert 1e-2 < cost.seconds < 3e-2
    assert MEASURED.seconds("all_reduce", 1_000_000, GroupShape(8, 8)).seconds > 3e-2


def test_what_was_not_measured_is_refused_unless_there_is_a_link():
    with pytest.raises(ClusterError, match="no curve of all_gather"):
        MEASURED.seconds("all_gather", 1000, FOUR)
    with pytest.raises(ClusterError, match="'gather' is no collective"):
        MEASURED.seconds("gather", 1000, FOUR)
    default = Cluster.default(4, "cpu")
    assert {default.seconds(name, 1000, FOUR).kind for name in COLLECTIVES} == {"modelled"}
    assert default.seconds("all_gather", 1000, GroupShape(1, 1)).seconds == 0


def test_gloo_scatters_at_the_price_of_reducing():
    assert ring("reduce_scatter", 4, "gloo") == ring("all_reduce", 4, "gloo") == (6, 1.5)
    assert ring("reduce_scatter", 4, "nccl") == (3, 0.75)


@pytest.mark.parametrize(
    "cluster",
    [
        MEASURED,
        Cluster.default(8, "H100"),
        dataclasses.replace(Cluster.default(1, "H100"), host=HOST, figures=DEVICES[0]),
    ],
)
def test_round_trips(cluster, tmp_path):
    cluster.save(tmp_path / "cluster.json")
    loaded = Cluster.load(tmp_path / "cluster.json")
    assert loaded == cluster
    if cluster.topology:
        assert nx.utils.graphs_equal(loaded.topology, cluster.topology)
    assert pickle.loads(pickle.dumps(cluster)) == cluster


def test_older_documents_lack_host_memory():
    document = dataclasses.replace(Cluster.default(1, "H100"), host=HOST).to_dict()
    measured = Cluster.from_dict(document)
    assert measured.transfers(TO_HOST) == measured.transfers(FROM_HOST) == HOST
    assert measured.transfers(FROM_HOST).seconds(FROM_HOST, 1000) == Cost(2e-5, TODAY)
    del document["host"]["both_ways"]
    assert Cluster.from_dict(document).host.both_ways == 1.0
    with pytest.raises(ClusterError, match=r"\$\.host.*from 1"):
        Cluster.from_dict({**document, "host": {**document["host"], "both_ways": 0.5}})
    with pytest.raises(ClusterError, match=r"\$\.host"):
        Cluster.from_dict({**document, "host": {"write": 1}})
    del document["host"]
    assert Cluster.from_dict(document).host is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema_version": 99}, "schema 99"),
        ({"surprise": 1}, "unknown field `surprise`"),
        (
            {"curves": [{"collective": "all_reduce"}]},
            r"\$.curves\[0\]: object missing required field `ranks`",
        ),
        ({"slowdown": {"bytes": [1]}}, r"\$.slowdown: object missing"),
        ({"ranks_per_node": 9}, r"\$.ranks_per_node is 9, but \$.world_size is 4"),
        ({"provenance": "somebody said so"}, r"\$.provenance is 'somebody said so'"),
    ],
)
def test_foreign_files_are_refused(change, says):
    with pytest.raises(ClusterError, match=says):
        Cluster.from_dict({**MEASURED.to_dict(), **change})


def test_a_file_that_is_no_cluster_is_named(tmp_path):
    path = tmp_path / "cut.json"
    path.write_text('{"name": ')
    with pytest.raises(ClusterError, match=r"cut\.json is not a cluster, or not JSON"):
        Cluster.load(path)
    path.write_text("[]")
    with pytest.raises(ClusterError, match=r"cut\.json: this is no cluster"):
        Cluster.load(path)
