"""Cells of `benchmarks.emulated`: plans with CUDA's attention, run on all ranks in one process."""

from typing import Any

import pytest

from benchmarks.emulated import Shared
from tests.passes import meshes


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tp 2 x zero 3", "pp 2 x tp 2"])
def test_a_cell_passes(strategy: str) -> None:
    cell = Shared("gpt-dropout").run_cell("flash", strategy)
    assert cell.error == ""
    assert cell.solves == 0
    assert "tp 2" in cell.mesh
    assert any("flash" in name for name in cell.kernels)


def test_a_wrong_gradient_fails_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    run = meshes.run_ranks

    def slightly_off(*given: Any) -> Any:
        results = run(*given)
        return [{role: x * (1 + 1e-6) for role, x in own.items()} for own in results]

    monkeypatch.setattr(meshes, "run_ranks", slightly_off)
    assert "1.0e-06" in Shared("gpt").run_cell("efficient", "ddp").error
