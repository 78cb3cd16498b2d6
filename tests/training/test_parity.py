"""Every model of `tests/harness/models.py` trains on several ranks exactly as on one.

Each model trains on one rank, on two and, in turn, on three or four, under every ZeRO stage and a
mixture of them. Recomputation and batch mode alternate, so that the models together meet every
combination. Three of these are quick tests: the others take minutes.
"""

from typing import Any

import pytest
import torch

from tests.harness.models import MODELS
from tests.harness.training import EXACT, Setup, assert_same_training, plain, train_all
from tests.harness.worlds import run

NAMES = tuple(name for name in MODELS if name not in ("dropout", "uneven"))
LEVELS = ("none", "selective", "full")
BATCHES = (("global", 13), ("local", 12))  # 13 rows are uneven over 2, 3 and 4 ranks
MIXED = {
    "gpt": {"": 1, "blocks.0": 3, "blocks.1": 2},
    "encoder": {"": 3, "layers.0": 0, "layers.1": 3},
    "encdec": {"": 0, "encoder.0": 1, "encoder.1": 3, "decoder.0": 2, "decoder.1": 3},
    "moe": {"": 2, "blocks.0": 0, "blocks.1": 3},
}
QUICK = (("gpt", 2), ("conv", 2), ("moe", 3))


def tier(name: str, world_size: int) -> Any:
    """The parameters of a test, which is slow but for a few."""
    return pytest.param(
        name, world_size, marks=() if (name, world_size) in QUICK else pytest.mark.slow
    )


def setups(name: str, world_size: int) -> list[Setup]:
    """The ways in which a model is trained at a world size."""
    shift = NAMES.index(name) + world_size
    if world_size == 1:
        return [Setup(recompute=level) for level in LEVELS[shift % 2 :]]
    stages: list[Any] = [0, 1, 2, 3] if world_size == 2 else [shift % 3, 3]
    if name in MIXED and world_size > 2:
        stages[0] = MIXED[name]
    found = []
    for index, zero in enumerate(stages):
        mode, rows = BATCHES[(shift + index + index // 2) % 2]
        found.append(Setup(zero, LEVELS[(shift + index) % 3], mode, rows))
    return found


def assert_parity(name: str, world_size: int, dtype: torch.dtype, setups: list[Setup]) -> None:
    answers = run(train_all, world_size, name=name, dtype=dtype, setups=setups, timeout=300)
    for rank, answer in enumerate(answers):
        for got, setup in zip(answer, setups, strict=True):
            what = f"rank {rank} under {setup}"
            assert_same_training(got, plain(name, dtype, setup.rows), EXACT[dtype], what)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [tier(name, size) for index, name in enumerate(NAMES) for size in (1, 2, 3 + index % 2)],
)
def test_float64_under_adamw(name: str, world_size: int) -> None:
    assert_parity(name, world_size, torch.float64, setups(name, world_size))


@pytest.mark.parametrize(("name", "world_size"), [tier(n, 2 if n == "conv" else 3) for n in NAMES])
def test_float32_under_sgd(name: str, world_size: int) -> None:
    setups = [Setup(MIXED.get(name, 0), "selective", "local", 12), Setup(3, "full")]
    assert_parity(name, world_size, torch.float32, setups)


def test_all_combinations_are_met() -> None:
    """Every stage with every level, and with both batch modes, over the models at 2 ranks."""
    met = [setup for name in NAMES for setup in setups(name, 2)]
    assert {(s.zero, s.recompute) for s in met} == {(z, r) for z in range(4) for r in LEVELS}
    assert {(s.zero, s.batch) for s in met} == {(z, b) for z in range(4) for b, _ in BATCHES}
    assert {(s.recompute, s.batch) for s in met} == {(r, b) for r in LEVELS for b, _ in BATCHES}
