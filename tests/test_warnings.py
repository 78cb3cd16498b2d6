"""Warnings: a class for each kind, once, on rank 0, at the user's line."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.core.common.notices import NumericsNote
from autopar.cost_model.disk_cache import write_cached
from autopar.runtime.codegen.program import Program
from autopar.runtime.fallback import describe_fallback_differences
from autopar.runtime.spmd import executor as whole
from tests.harness.training import fixed
from tests.harness.worlds import run
from tests.runtime.test_fallback import Branching

Said = list[tuple[str, str, str]]
"""Class, message and file of every warning of autopar."""


class Net(nn.Module):
    """Large enough that compressing pays for itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def noted(build: Callable[..., Program]) -> Callable[..., Program]:
    """A build of programs that finds something in the model that differs from one device."""

    def with_note(*args: Any, **kwargs: Any) -> Program:
        program = build(*args, **kwargs)
        notes = NumericsNote("each rank sorts its own rows (model.py:7)"), "a plain note"
        return replace(program, graph=replace(program.graph, notes=notes))

    return with_note


def train(make: Callable[[], nn.Module], width: int, **options: Any) -> None:
    """Two models alike, two calls of each: nothing is to be said twice."""
    for _ in range(2):
        model = autopar.compile(make(), **options)
        for rows in (4, 6):
            model(torch.ones(rows, width)).backward()


def differing() -> None:
    with patch.object(whole, "build_program", noted(whole.build_program)):
        train(Net, 64, strategy=fixed(0))


def compressing() -> None:
    train(Net, 64, strategy=fixed(0, compress="int8"))


def falling_back() -> None:
    train(Branching, 4, strategy="ddp")


def on_trial() -> None:
    inputs = (torch.ones(4, 64),)
    plan = autopar.plan(Net(), 2, example_inputs=inputs, strategy=fixed(0))
    with patch.object(whole, "build_program", noted(whole.build_program)):
        autopar.compile(Net(), strategy=fixed(0)).copy_with_plan(plan)(*inputs)


KINDS = {
    "differing": differing,
    "compressing": compressing,
    "falling back": falling_back,
    "on trial": on_trial,
}


def said(rank: int, world_size: int, *, kind: str) -> Said:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        KINDS[kind]()
    ours = [w for w in caught if issubclass(w.category, autopar.AutoparWarning)]
    return [(w.category.__name__, str(w.message), Path(w.filename).name) for w in ours]


@pytest.mark.parametrize(
    ("kind", "category", "parts"),
    [
        ("differing", "NumericsWarning", ["each rank sorts its own rows (model.py:7)"]),
        ("compressing", "LossyWarning", ["gradients are compressed", "int8"]),
        ("falling back", "FallbackWarning", ["x.abs().max() > 1e3", "a mean over anything else"]),
    ],
)
def test_each_kind_is_said_once_by_rank_0(kind: str, category: str, parts: list[str]) -> None:
    first, second = run(said, 2, kind=kind)
    assert second == []
    ((name, message, file),) = first
    assert name == category
    assert all(part in message for part in parts)
    assert file == "test_warnings.py"  # the line that called autopar, not one inside of it


def test_plans_on_trial_say_nothing() -> None:
    assert run(said, 2, kind="on trial") == [[], []]


def as_errors(rank: int, world_size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.AutoparWarning)
        train(Branching, 4, strategy="ddp")


def test_a_warning_made_an_error_is_raised_on_every_rank() -> None:
    for answer in run(as_errors, 2, expect_errors=True):
        assert answer.type == "FallbackWarning"


def test_batch_norm_of_a_rank_is_named() -> None:
    class Normed(Branching):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

    assert "own rows: norm." in describe_fallback_differences(Normed())
    assert "atch norm" not in describe_fallback_differences(Branching())


def test_what_cannot_be_kept_is_a_warning_of_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "file"))
    with pytest.warns(autopar.MeasurementWarning, match="could not keep its measurements"):
        write_cached("clusters", {}, {})
