"""The driver of `benchmarks.gpu`, and its code on the CPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import main, run_part
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.verdict import judge


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["nccl", "ranks", "offload", "offload-order", "steps", "operators"]
)
def test_a_dry_run_fills_the_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert main(["--dry-run", "--part", name, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["dry_run"]
    assert document["versions"]["commit"]
    assert len(document["parts"][name]["rows"]) >= 2


@pytest.mark.slow
@pytest.mark.processes
def test_a_part_that_dies_or_hangs_is_told() -> None:
    kept: list[dict[str, Any]] = []
    run_part(PARTS["nccl"], "no such part", True, kept.append)
    assert "invalid choice" in kept[-1]["ended"]
    run_part(replace(PARTS["nccl"], limit_s=0.0), "nccl", True, kept.append)
    assert kept[-1]["ended"].startswith("stopped at its time limit")
    assert kept[-1]["rows"] == []


@pytest.mark.slow
def test_resuming_keeps_the_parts_that_ended(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert main(["--dry-run", "--part", "rates", "--minutes", "0", "--json", str(path)]) == 0
    assert main(["--dry-run", "--part", "nccl", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    document["parts"]["nccl"]["rows"][0]["remark"] = "kept"
    path.write_text(json.dumps(document))
    assert main(["--dry-run", "--part", "nccl", "--json", str(path), "--resume"]) == 0
    assert json.loads(path.read_text())["parts"]["nccl"]["rows"][0]["remark"] == "kept"


def test_the_verdict_says_what_is_wrong() -> None:
    slow = {"case": "step", "ok": False, "remark": "late", "predicted_ms": 1.0, "ratio": 0.5}
    verdict = judge("steps", {"rows": [slow], "ended": "", "seconds": 1.0})
    assert verdict.right is False
    assert verdict.text == "step: late, predicted 2.00 times too fast"
    cut = {"rows": [{**slow, "ok": True}], "ended": "stopped at its time limit: x", "seconds": 1.0}
    assert judge("steps", cut).right is None
    assert judge("steps", None).text == "did not run"
    assert judge("steps", {**cut, "ended": ""}).right


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_no_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", str(tmp_path / "gpu.json")]) == 0
    assert "skipped: torch sees no GPU" in capsys.readouterr().out
    assert not (tmp_path / "gpu.json").exists()
