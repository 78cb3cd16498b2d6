"""Loops of libraries under plans are those of the library on one process."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainingArguments

import autopar
from autopar.integrations.accelerate import AutoparAccelerator
from autopar.integrations.optimizers import model_of
from autopar.integrations.transformers import AutoparTrainer
from benchmarks.integrations.plans import run_plain, run_plans
from benchmarks.integrations.record import forget_accelerator, whole_weights
from benchmarks.integrations.task import collate, make_model, make_rows
from benchmarks.integrations.trainer import settings_of
from tests.harness import worlds
from tests.harness.training import fixed

STEPS = 4
TOLERANCES = {"trainer": {"losses": 1e-6}}  # Trainer adds up losses in float32
PLANS = {"ddp": fixed(0), "zero3": fixed(3), "tp2": fixed(0, tp=2)}
CASES = {
    "trainer": ("zero3", "tp2"),
    "accelerate": ("ddp", "zero3"),
    "lightning": ("zero3", "tp2"),
    "fabric": ("ddp", "zero3"),
}
"""Plans of each loop; benchmarks.integrations has them all."""


@pytest.mark.slow
@pytest.mark.parametrize("part", CASES)
def test_loops_train_and_resume_as_on_one_process(part: str, tmp_path: Path) -> None:
    plans = {name: PLANS[name] for name in CASES[part]}
    options = {"part": part, "folder": str(tmp_path / "plans"), "steps": STEPS, "plans": plans}
    plain, tolerances = run_plain(part, str(tmp_path), STEPS), TOLERANCES.get(part, {})
    for records in worlds.run(run_plans, 2, **options):
        for name, record in records.items():
            found = record.distance(plain)
            assert len(record.losses) >= STEPS
            assert all(found[kind] < tolerances.get(kind, 1e-9) for kind in found), (name, found)


def train_with_optimizers(rank: int, ranks: int, folder: str) -> dict[str, torch.Tensor]:
    """Gives the Trainer an optimizer and a scheduler, made of the plain model."""
    forget_accelerator()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    options = {"strategy": fixed(3)} if ranks > 1 else {}
    settings = settings_of(Path(folder), ranks, STEPS)
    trainer = (AutoparTrainer if ranks > 1 else Trainer)(
        model=model,
        args=TrainingArguments(**settings),
        train_dataset=make_rows(22, 0),
        data_collator=collate,
        optimizers=(optimizer, scheduler),
        **options,
    )
    trainer.train()
    forget_accelerator()
    return whole_weights(trainer.model)


@pytest.mark.slow
def test_the_trainer_takes_an_optimizer_of_the_plain_model(tmp_path: Path) -> None:
    plain = train_with_optimizers(0, 1, str(tmp_path / "plain"))
    for weights in worlds.run(train_with_optimizers, 2, folder=str(tmp_path / "compiled")):
        torch.testing.assert_close(weights, plain, rtol=1e-9, atol=1e-9)


def train_compiled(rank: int, ranks: int, folder: str) -> None:
    """Gives the plain Trainer a compiled model."""
    model = autopar.compile(make_model(), strategy=fixed(0), batch="local")
    args = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[], max_steps=1)
    data = {"train_dataset": make_rows(8, 0), "data_collator": collate}
    trainer = Trainer(model=model, args=args, **data)
    trainer.train()


def test_plain_trainer_refuses_a_compiled_model(tmp_path: Path) -> None:
    with pytest.raises(worlds.RankError, match="summed them already: use autopar"):
        worlds.run(train_compiled, 2, folder=str(tmp_path))


def prepare_compiled(rank: int, ranks: int) -> str:
    """Prepares a compiled model with the plain accelerator, then with mixed precision."""
    forget_accelerator()
    model = autopar.compile(make_model(), strategy=fixed(3), batch="local")
    assert Accelerator(cpu=True).prepare(model) is model
    forget_accelerator()
    with pytest.raises(autopar.StrategyError) as raised:
        Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    return str(raised.value)


def test_plain_accelerator_leaves_a_compiled_model_unwrapped() -> None:
    for message in worlds.run(prepare_compiled, 2):
        assert "Give autopar.compile precision='bf16'" in message


def test_an_empty_optimizer_belongs_to_the_only_compiled_model() -> None:
    """As on a pipeline stage without parameters, which saves and loads with the others."""
    model, other = (autopar.compile(nn.Linear(2, 2), 1) for _ in range(2))
    empty, own = torch.optim.SGD([{"params": []}]), torch.optim.SGD(model.parameters())
    assert model_of(empty, [nn.Linear(2, 2), model]) is model
    assert model_of(empty, [model, other]) is None
    assert model_of(own, [other, model]) is model


def test_accelerator_refuses_parts_of_batches() -> None:
    forget_accelerator()
    with pytest.raises(autopar.StrategyError, match="dispatch_batches=True hands"):
        AutoparAccelerator(cpu=True, dataloader_config=_dispatching())
    forget_accelerator()


def _dispatching() -> object:
    utils = pytest.importorskip("accelerate.utils")
    return utils.DataLoaderConfiguration(dispatch_batches=True)
