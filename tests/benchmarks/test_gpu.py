"""The driver of `benchmarks.gpu`, and its code on the CPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import main, run_part
from benchmarks.gpu.parts import PARTS


@pytest.mark.processes
@pytest.mark.parametrize("name", ["nccl", "ranks", "offload", "offload-order"])
def test_a_dry_run_fills_the_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert main(["--dry-run", "--part", name, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["dry_run"]
    assert document["versions"]["commit"]
    assert len(document["parts"][name]["rows"]) >= 4


@pytest.mark.processes
def test_a_part_that_dies_or_hangs_is_told() -> None:
    died = run_part(PARTS["nccl"], "no such part", dry_run=True)
    assert "invalid choice" in died["ended"]
    hung = run_part(replace(PARTS["nccl"], limit_s=0.0), "nccl", dry_run=True)
    assert hung["ended"].startswith("stopped at its time limit")
    assert hung["rows"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_no_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", str(tmp_path / "gpu.json")]) == 0
    assert "skipped: torch sees no GPU" in capsys.readouterr().out
    assert not (tmp_path / "gpu.json").exists()
