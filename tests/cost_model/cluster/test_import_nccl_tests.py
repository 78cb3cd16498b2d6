import pytest

from autopar.cli.main import main
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cluster.import_nccl_tests import import_nccl_tests
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.group_shape import GroupShape
from tests.cost_model.nccl.test_nccl_tests import NEW, write


def test_a_cluster_of_outputs(tmp_path):
    cluster = import_nccl_tests([write(tmp_path, NEW)], name="mine")
    assert (cluster.world_size, cluster.ranks_per_node, cluster.device) == (4, 2, "NVIDIA H100")
    cost = cluster.seconds("all_reduce", 1048576, GroupShape(4, 2))
    assert cost.seconds == pytest.approx(50e-6)
    assert cost.provenance == "imported from run.log"
    assert cost.error == pytest.approx(0.02)  # the two timings are 4 % apart
    other = cluster.seconds("all_reduce", 1048576, GroupShape(8, 2))
    assert other.kind == "modelled"
    assert other.provenance.endswith("on a fabric that is not uniform")
    assert other.error > 0.5
    with pytest.raises(ClusterError, match=r"not uniform.*measure all_reduce over 2 ranks, 2 a"):
        cluster.seconds("all_reduce", 1048576, GroupShape(2, 2))
    with pytest.raises(ClusterError, match="no curve of all_gather: measure it"):
        cluster.seconds("all_gather", 1048576, GroupShape(4, 2))


def test_what_no_plan_issues_is_left_out_with_a_warning(tmp_path):
    reduce = NEW.replace("all_reduce", "reduce")
    paths = [write(tmp_path, NEW), write(tmp_path, reduce, "reduce.log")]
    with pytest.warns(UserWarning, match=r"reduce\.log: no plan issues reduce"):
        assert len(import_nccl_tests(paths).curves) == 1
    with pytest.raises(ClusterError, match="there is another table of all_reduce"):
        import_nccl_tests([paths[0], paths[0]])


def test_the_command(tmp_path, capsys):
    output = tmp_path / "cluster.json"
    path = write(tmp_path, NEW)
    assert main(["import-nccl-tests", str(path), "-o", str(output), "--least-bytes", "2M"]) == 0
    assert "all_reduce of float32 over 4 ranks, 2 a node: imported" in capsys.readouterr().out
    (entry,) = Cluster.load(output).curves.values()
    assert entry.curve.bytes == (8388608,)
    assert main(["import-nccl-tests", str(tmp_path / "none.log"), "-o", str(output)]) == 2
