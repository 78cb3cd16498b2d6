"""`autopar collectives`."""

import json
from dataclasses import replace

import pytest

from autopar.cli.main import main
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.nccl.tuner import check


def shown(capsys, *arguments: str) -> str:
    assert main(["collectives", *arguments]) == 0
    return capsys.readouterr().out


def test_the_table_and_the_pick(capsys):
    text = shown(capsys, "--bytes", "64MB", "--ranks", "16", "--nodes", "2")
    rows = [line for line in text.splitlines() if line.rstrip().endswith("]")]
    assert rows[0].startswith(" the planner's price")
    assert "imported [1]" in rows[0]
    names = [row.split()[0] for row in rows[1:]]
    assert {"ring/ll", "ring/ll128", "ring/simple", "tree/ll", "tree/simple"} <= {*names}
    assert f"picks {names[0]} on 16 channels" in text
    assert "By size: tree/ll, " in text
    assert "[2] modelled by NCCL 2.30.3's tuning" in text


def test_the_same_as_json(capsys):
    ask = ("--bytes", "64MB", "--ranks", "16", "--nodes", "2", "--json")
    document = json.loads(shown(capsys, *ask))
    price, *algorithms = document["times"]
    assert price["kind"] == "imported"
    assert price["bus_bytes_per_s"] == pytest.approx(15 / 8 * 64e6 / price["seconds"])
    assert algorithms[0]["seconds"] <= algorithms[-1]["seconds"]
    assert any("picks" in note for note in document["notes"])


def test_more_nodes_than_were_measured(capsys):
    text = shown(capsys, "--bytes", "1MB", "--ranks", "32", "--nodes", "4", "--cluster", "dgx-h100")
    assert "on 4 x" in text
    assert "the planner's price" in text


def test_a_measured_host_without_a_topology(tmp_path, capsys):
    sizes = tuple(2**k for k in range(10, 26))
    curve = Curve(sizes, tuple(6 * 1e-4 + 1.5 * n / 1e9 for n in sizes))  # a ring of 4
    entry = Measured(curve, "measured today on this host", "gloo, torch 2.13.0")
    cluster = replace(
        Cluster.default(4), link=None, curves={CurveKey("all_reduce", GroupShape(4, 4)): entry}
    )
    path = tmp_path / "cluster.json"
    cluster.save(path)
    text = shown(capsys, "--bytes", "1MiB", "--ranks", "4", "--cluster", str(path))
    assert "measured today on this host" in text
    assert "this cluster runs gloo" in text
    ask = ["collectives", "--bytes", "1MiB", "--ranks", "4", "--cluster", str(path)]
    assert main([*ask, "--collective", "broadcast"]) == 2
    assert "has no curve of broadcast: measure it" in capsys.readouterr().err


def test_what_cannot_be_answered_says_why(capsys):
    ask = ["collectives", "--bytes", "1MiB", "--ranks"]
    assert main([*ask, "8", "--nodes", "3"]) == 2
    assert "8 ranks do not fill 3 nodes" in capsys.readouterr().err
    assert main([*ask, "16"]) == 2
    assert "Give more --nodes" in capsys.readouterr().err
    assert main([*ask, "8", "--cluster", "mars"]) == 2
    assert "no cluster 'mars'" in capsys.readouterr().err
    assert main([*ask, "8", "--nccl", "2.22.3"]) == 2
    assert "NCCL 2.22.3 are not known" in capsys.readouterr().err


def test_the_tuner_file(tmp_path, capsys):
    path = tmp_path / "nccl_tuner.conf"
    ask = ["--bytes", "1MiB", "--ranks", "8", "--tuner", str(path)]
    shown(capsys, *ask)
    assert check(path.read_text())
    log = tmp_path / "all_reduce_ring.csv"
    columns = "size_bytes,count,dtype,oop_time_us,oop_algbw,oop_busbw,ip_time_us,ip_algbw,ip_busbw"
    rows = [f"{2**k},{2**k // 4},float,{10 + 2**k / 1e4},0,0,10,0,0" for k in range(10, 12)]
    log.write_text(
        "\n".join(["# collective: all_reduce", "# ranks: 8", "# nodes: 1", columns, *rows])
    )
    shown(capsys, *ask, "--forced", f"ring/simple={log}")
    assert "# allreduce, 8 ranks on 1 nodes: measured: 1 combinations" in path.read_text()
    assert main(["collectives", *ask, "--forced", f"rong/simple={log}"]) == 2
    assert "say ALGORITHM/PROTOCOL=FILE" in capsys.readouterr().err
