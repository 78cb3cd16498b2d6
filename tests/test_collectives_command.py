"""`autopar collectives`."""

import pytest

from autopar.cli import main
from autopar.cost_model.tuner import check


def shown(capsys, *arguments: str) -> str:
    assert main(["collectives", *arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")


def test_the_table_the_pick_and_why(capsys):
    text = shown(capsys, "--bytes", "64MB", "--ranks", "16", "--nodes", "2")
    rows = [line for line in text.splitlines() if "modelled by" in line and "GB/s" not in line]
    names = [row.split()[0] for row in rows]
    assert {"ring", "tree", "double_tree", "hierarchical", "halving_doubling", "direct"} <= {*names}
    assert "ring *" in text
    assert "imported from" in text
    assert "nic" in text
    assert "fastest by size" in text
    assert "modelled by Thakur, Rabenseifner & Gropp 2005" in text
    for line in rows:
        assert any(kind in line for kind in ("measured", "imported", "modelled"))


def test_what_cannot_be_answered_says_why(capsys):
    ask = ["collectives", "--bytes", "1MiB", "--ranks"]
    assert main([*ask, "8", "--nodes", "3"]) == 2
    assert "8 ranks do not fill 3 nodes" in capsys.readouterr().err
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
