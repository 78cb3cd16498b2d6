"""The benchmark of planning by the size of the world, on a tiny model."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.planning import scaling
from benchmarks.planning.models import Made
from benchmarks.planning.questions import Question


def tiny() -> Made:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        return model, (torch.zeros(32, 64),)


TINY = {f"{gpus} GPUs": Question(tiny, "dgx-h100", gpus, {}, precision=None) for gpus in (8, 16)}


def test_rows_are_kept_and_repeated_under_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, told = tmp_path / "scaling.json", ["--limit", "5", "--json"]
    assert scaling.main([*told, str(result), "--only", "8 GPUs"], TINY) == 0
    assert scaling.main([*told, str(result)], TINY) == 0
    document = json.loads(result.read_text())
    assert [row["gpus"] for row in document["rows"]] == [8, 16]
    for row in document["rows"]:
        assert row["step_s"] > 0
        assert 0 < row["first"]["cpu"] <= row["chosen"]["cpu"] <= row["plan_seconds"]["cpu"]
        assert row["peak_bytes"] > 2**20
    monkeypatch.setattr(scaling, "REPEATS", 1)
    assert scaling.main([*told, str(result), "--load", "1"], TINY) == 0
    document = json.loads(result.read_text())
    assert [row["name"] for row in document["loaded"]] == ["1 busy, 1 of 1"]
    assert document["ratio"] == pytest.approx(1.0)
    assert len(document["rows"]) == 2
    assert capsys.readouterr().out.count("CPU s") == 3


def test_the_ratio_needs_every_plan() -> None:
    assert scaling.ratio([{"step_s": 2.0}, {"step_s": 3.0}]) == 1.5
    assert scaling.ratio([{"step_s": 2.0}, {"error": "nothing fits"}]) is None
    assert scaling.ratio([]) is None
