"""`autopar measure`."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.cli.measure import mesh_of, sizes_of
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.curves.measured_curve import CurveKey
from autopar.cost_model.group_shape import GroupShape

QUICK = ["--budget", "0.2", "--sizes", "1KiB", "--no-cache"]


@pytest.mark.slow
def test_ranks_of_this_machine_are_launched_and_measured(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    command = [sys.executable, "-m", "autopar", "measure", "--nproc", "2", *QUICK]
    command += ["--mesh", "dp=2", "--dtype", "bfloat16", "--output", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "all_gather" in done.stdout
    assert CurveKey("all_gather", GroupShape(2, 2), "bfloat16") in Cluster.load(path).curves


def test_one_process_has_nothing_to_send(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "--nproc", "1", *QUICK]) == 0
    assert "no collectives" in capsys.readouterr().out


def test_contradictions_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["measure", "--nproc", "0"]) == 2
    assert "argument --nproc: '0' is not a whole number from 1" in capsys.readouterr().err
    assert main(["measure", "--nproc", "1", "--budget", "-1"]) == 2
    assert "argument --budget: '-1' is not a positive number" in capsys.readouterr().err
    monkeypatch.setitem(os.environ, "RANK", "0")
    assert main(["measure", "--nproc", "2"]) == 2
    assert "--nproc under torchrun" in capsys.readouterr().err


def test_sizes_and_meshes_are_read() -> None:
    assert sizes_of("512, 64KiB,1mib") == (512, 2**16, 2**20)
    assert mesh_of("dp=2,tp=4") == {"dp": 2, "tp": 4}
    for text in ("", "12XB", "0", "KiB"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
            sizes_of(text)
    for text in ("dp", "dp=0", "=2"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a mesh"):
            mesh_of(text)
    with pytest.raises(argparse.ArgumentTypeError, match="names an axis twice"):
        mesh_of("dp=2,dp=2")
