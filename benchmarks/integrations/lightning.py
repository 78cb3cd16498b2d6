"""Lightning's Trainer on one process, and under plans."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.seed import isolate_rng
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from benchmarks.integrations.record import Record, quieten, whole_weights
from benchmarks.integrations.task import (
    BATCH,
    VOCABULARY,
    causal_loss,
    collate,
    make_model,
    make_rows,
)


class LanguageModel(LightningModule):
    """A tutorial's module: the loss, logs and metrics are in its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        options: dict[str, Any] = {"num_classes": VOCABULARY, "ignore_index": -100}
        self.accuracy = MulticlassAccuracy(average="micro", **options)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self(batch)
        loss = causal_loss(logits, batch["labels"], VOCABULARY)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        logits = self(batch)
        loss = causal_loss(logits, batch["labels"], VOCABULARY)
        self.accuracy(logits[:, :-1].reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1))
        self.log("val_loss", loss, batch_size=len(logits))
        self.log("val_accuracy", self.accuracy)

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Log(Callback):
    """Keeps losses, and norms before clipping."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.record.losses.append(trainer.callback_metrics["loss"].item())

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        compiled: Any = trainer.strategy.model  # the module itself on one process
        clip = getattr(compiled, "clip_grad_norm_", partial(clip_grad_norm_, module.parameters()))
        self.record.norms.append(clip(math.inf).item())


def make_trainer(record: Record, folder: str, ranks: int, steps: int, **options: Any) -> Trainer:
    """A trainer over batches of `BATCH` rows; under autopar if there are several ranks."""
    more: dict[str, Any] = {"devices": 1}
    if ranks > 1:
        from autopar.integrations.lightning import AutoparStrategy

        more = {"devices": ranks, "strategy": AutoparStrategy(**options)}
    save = ModelCheckpoint(folder, "middle", every_n_train_steps=steps // 2, save_top_k=-1)
    return Trainer(
        accelerator="cpu",
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        check_val_every_n_epoch=None,
        val_check_interval=6,
        callbacks=[Log(record), save],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def loaders(ranks: int) -> list[DataLoader[Any]]:
    """Loaders for training and validation."""
    return [
        DataLoader(rows, BATCH // ranks, shuffle=shuffle, collate_fn=collate)  # type: ignore[arg-type]
        for rows, shuffle in ((make_rows(22, 0), True), (make_rows(9, 1), False))
    ]


def run(
    rank: int, ranks: int, folder: str, steps: int, resume: Any = None, **options: Any
) -> Record:
    """Trains, evaluates, predicts, and resumes in the middle under the options of `resume`."""
    quieten()
    record, train, held_out = Record(), *loaders(ranks)
    torch.manual_seed(1)
    module = LanguageModel()
    trainer = make_trainer(record, folder, ranks, steps, **options)
    trainer.fit(module, train, held_out)
    record.weights = whole_weights(trainer.strategy.model)
    (found,) = trainer.validate(module, held_out, verbose=False)
    record.evaluation = {name: torch.tensor(value) for name, value in found.items()}
    record.evaluation["logits"] = torch.cat(trainer.predict(module, held_out))
    rest, again = Record(), LanguageModel()
    trainer = make_trainer(rest, folder + "-again", ranks, steps, **(resume or options))
    with isolate_rng():
        trainer.fit(again, train, held_out, ckpt_path=f"{folder}/middle.ckpt")
    record.resumed = whole_weights(trainer.strategy.model)
    return record
