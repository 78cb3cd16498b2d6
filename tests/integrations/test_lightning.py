"""Steps of a LightningModule under a plan: what they log, read and refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Fabric
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryConfusionMatrix
from torchmetrics.functional import mean_squared_error

import autopar
from autopar.integrations.lightning import AutoparFabricStrategy, AutoparStrategy
from autopar.runtime.parameters.distribute import is_remote
from benchmarks.integrations.record import quieten
from tests.harness import worlds
from tests.harness.training import fixed


class Classifier(LightningModule):
    """A module that uses what tutorials use."""

    def __init__(self, on_meta: bool = False) -> None:
        super().__init__()
        self.on_meta = on_meta
        self.net: Any = None
        self.metrics = MetricCollection([BinaryAccuracy(), BinaryConfusionMatrix()])
        self.seen = 0

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta" if self.on_meta else "cpu"):
                self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def shared_step(self, batch: Any, name: str) -> torch.Tensor:
        x, y = batch
        logits = self.net(x).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, y.double())
        self.log_dict({f"{name}_loss": loss, f"{name}_rate": (logits > 0).double().mean()})
        if name == "train":
            self.metrics.update(logits, y)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        weight = 1 + 0.5 * self.current_epoch + (batch_idx % 2)
        loss = weight * self.shared_step(batch, "train")
        self.log("epoch", self.current_epoch)
        return {"loss": loss, "rows": batch[0]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += len(outputs["rows"])

    def on_train_epoch_end(self) -> None:
        matrix = self.metrics.compute()["BinaryConfusionMatrix"]
        self.log("mistakes", (matrix[0, 1] + matrix[1, 0]).double())
        self.metrics.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.shared_step(batch, "val")
        x, y = batch
        self.log("error", mean_squared_error(self.net(x).squeeze(1).sigmoid(), y.double()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() == 1]
        groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]
        return torch.optim.AdamW(groups, lr=1e-2)


def data(ranks: int) -> DataLoader[Any]:
    torch.manual_seed(0)
    x = torch.randn(11, 4, dtype=torch.float64)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 4 // ranks, shuffle=True)


def fit(folder: str, ranks: int, module: LightningModule, **options: Any) -> dict[str, Any]:
    """Trains two epochs; the figures that Lightning keeps, and the checkpoint."""
    quieten()
    more: dict[str, Any] = {"devices": 1}
    if ranks > 1:
        more = {"devices": ranks, "strategy": AutoparStrategy(**options)}
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    torch.manual_seed(3)
    loader = data(ranks)
    trainer.fit(module, loader, loader)
    trainer.save_checkpoint(f"{folder}/end.ckpt")
    values = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {**values, "seen": module.seen}


def fit_on_ranks(rank: int, ranks: int, folder: str, **options: Any) -> dict[str, Any]:
    return fit(folder, ranks, Classifier(), **options)


@pytest.mark.slow
def test_steps_log_read_and_save_as_on_one_process(tmp_path: Path) -> None:
    plain = fit(str(tmp_path / "plain"), 1, Classifier())
    for found in worlds.run(fit_on_ranks, 2, folder=str(tmp_path / "zero3"), strategy=fixed(3)):
        assert found == pytest.approx(plain, rel=1e-9)
    saved, loaded = (
        torch.load(tmp_path / name / "end.ckpt", weights_only=False) for name in ("plain", "zero3")
    )
    torch.testing.assert_close(loaded["state_dict"], saved["state_dict"])
    ours, theirs = loaded["optimizer_states"], saved["optimizer_states"]
    torch.testing.assert_close(ours[0]["state"], theirs[0]["state"])
    assert [g["params"] for g in ours[0]["param_groups"]] == [
        g["params"] for g in theirs[0]["param_groups"]
    ]


def fit_on_meta(rank: int, ranks: int, folder: str) -> bool:
    module = Classifier(on_meta=True)
    fit(folder, ranks, module, strategy=fixed(3))
    return not any(is_remote(p) for p in module.parameters())


@pytest.mark.slow
def test_modules_on_meta_are_initialised(tmp_path: Path) -> None:
    assert all(worlds.run(fit_on_meta, 2, folder=str(tmp_path)))


class ReadsOptimizer(Classifier):
    """Logs the learning rate inside of its step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return self.shared_step(batch, "train")


class ManualSteps(Classifier):
    """Runs the backward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Wrapped(Classifier):
    """Compiles its network itself."""

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            self.net = autopar.compile(self.net, strategy=fixed(0), batch="local")


def refuse(rank: int, ranks: int, folder: str) -> list[str]:
    """The errors of modules that cannot be trained as they are."""
    told = []
    for kind in (ReadsOptimizer, ManualSteps):
        with pytest.raises(autopar.StrategyError) as raised:
            fit(folder, ranks, kind(), strategy=fixed(0))
        told.append(str(raised.value))
    trainer = Trainer(accelerator="cpu", devices=ranks, strategy="ddp", max_epochs=1, logger=False)
    with pytest.raises(autopar.StrategyError) as raised:
        trainer.fit(Wrapped(), data(ranks))
    told.append(str(raised.value))
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=AutoparFabricStrategy(fixed(0)))
    fabric.launch()
    module = Classifier()
    module.configure_model()
    with pytest.raises(autopar.StrategyError) as raised:
        fabric.setup(module).training_step(next(iter(data(ranks))), 0)
    return [*told, str(raised.value)]


def test_what_cannot_be_captured_is_told(tmp_path: Path) -> None:
    for told in worlds.run(refuse, 2, folder=str(tmp_path)):
        reads, manual, wrapped, fabric = told
        assert "Use it in a hook instead" in reads
        assert "automatic_optimization = False" in manual
        assert "reduces gradients a second time" in wrapped
        assert "other than forward" in fabric
