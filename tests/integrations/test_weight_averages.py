"""Averages of weights, factored optimizers and merged adapters in loops, as on one device."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import pytorch as lightning
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader
from transformers.optimization import Adafactor

import autopar
from autopar.integrations.lightning import AutoparStrategy
from tests.harness.training import fixed
from tests.harness.worlds import run

STRATEGIES = {"zero3": fixed(3), "tp": fixed(0, tp=2)}
Compile = Callable[[Any], Any]


def make() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)
    return nn.Sequential(*layers).double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = {"dtype": torch.float64, "generator": generator}
    return torch.randn(8, 6, **draw), torch.randn(8, 4, **draw)


def loss_of(model: Any, seed: int) -> Tensor:
    x, y = batch(seed)
    return F.mse_loss(model(x), y)


def train(model: Any, optimizer: Any, after_step: Callable[[], object] = lambda: None) -> None:
    for step in range(4):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()


def moving_average(compiled: Compile) -> Tensor:
    model = compiled(make())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    train(model, torch.optim.AdamW(model.parameters()), lambda: average.update_parameters(model))
    return loss_of(average.eval(), 9)


def stochastic_average(compiled: Compile) -> Tensor:
    model = compiled(make())
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, optimizer, lambda: average.update_parameters(model))
    update_bn([batch(seed)[0] for seed in range(3)], average)
    return loss_of(average.eval(), 9)


def teacher(compiled: Compile) -> Tensor:
    model = compiled(make())
    followed = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def follow() -> None:
        for average, parameter in zip(followed.parameters(), model.parameters(), strict=True):
            average.mul_(0.8).add_(parameter, alpha=0.2)

    train(model, torch.optim.AdamW(model.parameters()), follow)
    return loss_of(followed.eval(), 9)


def factored(compiled: Compile) -> Tensor:
    model = compiled(make())
    train(model, Adafactor(model.parameters(), lr=1e-2, relative_step=False))
    train(model, torch.optim.Adafactor(model.parameters(), lr=1e-2))
    return loss_of(model, 9)


def merged_adapter(compiled: Compile) -> Tensor:
    config = LoraConfig(r=2, target_modules=["0", "3"], init_lora_weights=False)
    model = compiled(get_peft_model(make(), config).double())
    train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    return loss_of(model.merge_and_unload().eval(), 9)


LOOPS: Mapping[str, Callable[[Compile], Tensor]] = {
    each.__name__: each
    for each in (moving_average, stochastic_average, teacher, factored, merged_adapter)
}


def train_all(rank: int, world_size: int) -> dict[tuple[str, str], float]:
    return {
        (name, strategy): loop(
            lambda model, plan=plan: autopar.compile(model, strategy=plan)
        ).item()
        for strategy, plan in STRATEGIES.items()
        for name, loop in LOOPS.items()
    }


@pytest.mark.slow
def test_loops_end_as_on_one_device() -> None:
    expected = {name: loop(lambda model: model).item() for name, loop in LOOPS.items()}
    for losses in run(train_all, 2, timeout=120):
        for (name, strategy), loss in losses.items():
            assert loss == pytest.approx(expected[name], rel=1e-9), (name, strategy)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)

    def training_step(self, rows: Any, index: int) -> Tensor:
        return self(*rows)

    def validation_step(self, rows: Any, index: int) -> None:
        self.log("loss", self(*rows))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


CALLBACKS: Mapping[str, Callable[[], lightning.Callback]] = {
    "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1),
    "average": WeightAveraging,
    "moving average": lambda: EMAWeightAveraging(decay=0.8),
}


def fit(rank: int, ranks: int, folder: str) -> dict[str, float]:
    """Losses after training with each callback, of a batch of 8 rows of all ranks."""
    losses = {}
    for name, callback in CALLBACKS.items():
        strategy: Any = AutoparStrategy(strategy=fixed(3)) if ranks > 1 else "auto"
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=strategy,
            max_epochs=4,
            callbacks=[callback()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=folder,
        )
        rows = [*zip(*map(torch.cat, zip(*map(batch, range(3)), strict=True)), strict=True)]
        loader: Any = DataLoader(rows, batch_size=8 // ranks)  # type: ignore[arg-type]
        trainer.fit(model := Regression(), loader)
        losses[name] = trainer.validate(model, loader, verbose=False)[0]["loss"]
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_callbacks_of_lightning_average_as_on_one_device(tmp_path: Path) -> None:
    expected = fit(0, 1, str(tmp_path))
    for losses in run(fit, 2, timeout=120, folder=str(tmp_path)):
        assert losses == pytest.approx(expected, rel=1e-9)
