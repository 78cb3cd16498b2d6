"""Trainer under plans is the plain Trainer on one process with the batch of all ranks."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

import autopar
from autopar import Strategy
from benchmarks.integrations.record import Record
from benchmarks.integrations.task import collate, make_model, make_rows
from benchmarks.integrations.trainer import run
from benchmarks.memoize import memoized_capture
from tests.harness import worlds
from tests.harness.training import fixed

STEPS = 4
TOLERANCE = {"losses": 1e-6}  # Trainer sums losses in float32


def run_all(rank: int, ranks: int, folder: str, plans: dict[str, Strategy]) -> dict[str, Record]:
    """Runs a trainer under each plan."""
    with memoized_capture():
        return {
            name: run(rank, ranks, folder, STEPS, strategy=plan, resumes=False)
            for name, plan in plans.items()
        }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The plain Trainer on one process."""
    return run(0, 1, str(tmp_path_factory.mktemp("plain")), STEPS, resumes=False)


def test_plans_train_as_one_process(plain: Record, tmp_path: Path) -> None:
    plans = {"ddp": fixed(0), "zero3": fixed(3), "tp2": fixed(0, tp=2)}
    for records in worlds.run(run_all, 2, folder=str(tmp_path), plans=plans):
        for name, record in records.items():
            found = record.distance(plain)
            assert all(found[kind] < TOLERANCE.get(kind, 1e-9) for kind in found), (name, found)


def train_compiled(rank: int, ranks: int, folder: str, batch: Any) -> None:
    """Gives the plain Trainer a compiled model."""
    model = autopar.compile(make_model(), strategy=fixed(0), batch=batch)
    args = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[], max_steps=1)
    data = {"train_dataset": make_rows(8, 0), "data_collator": collate}
    trainer = Trainer(model=model, args=args, **data)
    trainer.train()


def test_plain_trainer_refuses_a_compiled_model(tmp_path: Path) -> None:
    with pytest.raises(worlds.RankError, match="summed them already: use autopar"):
        worlds.run(train_compiled, 2, folder=str(tmp_path), batch="local")
