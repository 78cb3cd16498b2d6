"""The driver of `benchmarks.prediction`, and part `curves` on tables of a known law."""

import argparse
import json
import sys

import pytest

from autopar.cost_model.cost import ClusterError
from benchmarks.prediction import __main__ as driver
from benchmarks.prediction import curves
from benchmarks.prediction.report import overview

HEADER = """\
# source: https://example.org/{name}
# hardware: {nodes}x DGX A100, NVSwitch
# ranks: {ranks}
# nodes: {nodes}
# collective: all_reduce
size_bytes,count,dtype,oop_time_us,oop_algbw,oop_busbw,ip_time_us,ip_algbw,ip_busbw
"""


def table(folder, nodes, ranks, spoil=None):
    """Launch 20 us, 1 us a step, 100 GB/s."""
    name = f"dgxa100_{nodes}x{ranks // nodes}_allreduce"
    rows = []
    for power in range(3, 30):
        size, factor = 2**power, 2 * (ranks - 1) / ranks
        time = 20 + 2 * (ranks - 1) + size * factor / 1e5
        if power == spoil:
            time *= 10
        bus = size * factor / time / 1e3
        rows.append(f"{size},1,float,{time:.4f},0,{bus:.4f},{time:.4f},0,0\n")
    text = HEADER.format(name=name, nodes=nodes, ranks=ranks) + "".join(rows)
    (folder / f"{name}.csv").write_text(text)


def options(folder):
    return argparse.Namespace(tables=folder, part=["curves"], json=None, quick=True)


def test_held_out_sizes_and_larger_groups(tmp_path):
    for nodes, ranks in ((1, 4), (1, 8), (2, 16), (4, 32)):
        table(tmp_path, nodes, ranks, spoil=10 if nodes == 4 else None)
    (tmp_path / "cut.csv").write_text("size_bytes,count\n8,2\n")
    result = curves.run(options(tmp_path))
    assert ["cut.csv: line 2" in text for text in result["refused"]] == [True]
    assert len(result["cases"]) == 4 * 27  # every size once
    assert result["median_error"] < 0.02
    assert result["tables"]["dgxa100_4x8_allreduce"] == result["worst_error"] > 0.02
    groups = {case["group"] for case in result["other_groups"]["cases"]}
    assert groups == {"dgxa100_1x8_allreduce", "dgxa100_4x8_allreduce"}
    assert result["other_groups"]["median_error"] < 0.2
    assert result["other_groups"]["refused"] == []
    assert overview({"curves": result}).row_count == 2


def test_a_folder_without_tables_is_an_error(tmp_path):
    with pytest.raises(ClusterError, match="holds no tables"):
        curves.run(options(tmp_path))
    with pytest.raises(ClusterError, match="is no folder"):
        curves.run(options(tmp_path / "none"))


def test_a_part_that_cannot_run_is_an_error(tmp_path, monkeypatch, capsys):
    output = tmp_path / "out.json"
    arguments = ["prediction", "--part", "curves", "--tables", str(tmp_path / "none")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--json", str(output)])
    assert driver.main() == 1
    assert "is no folder" in capsys.readouterr().out
    assert "is no folder" in json.loads(output.read_text())["parts"]["curves"]["error"]
