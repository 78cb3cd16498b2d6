"""A loop of accelerate on one process, and under plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

from autopar.integrations.accelerate import AutoparAccelerator
from benchmarks.integrations.record import Record, forget_accelerator, whole_weights
from benchmarks.integrations.task import BATCH, causal_loss, collate, make_model, make_rows


class Loop:
    """A training script with accelerate, written for one process.

    Args:
        ranks: number of ranks; with one, the loop runs without autopar.
        options: arguments of `AutoparAccelerator`.
    """

    def __init__(self, ranks: int, **options: Any) -> None:
        kind = Accelerator if ranks == 1 else AutoparAccelerator
        self.accelerator = kind(cpu=True, gradient_accumulation_steps=2, **options)
        torch.manual_seed(1)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        loaders = [
            DataLoader(rows, BATCH // ranks, shuffle=shuffle, collate_fn=collate)
            for rows, shuffle in ((make_rows(22, 0), True), (make_rows(9, 1), False))
        ]
        parts = self.accelerator.prepare(model, optimizer, schedule, *loaders)
        self.model, self.optimizer, self.schedule, self.data, self.held_out = parts

    def train(self, record: Record, steps: int, folder: Path | None = None) -> None:
        """Trains for some steps of the optimizer; saves the state in the middle."""
        while True:
            for batch in self.data:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch).loss
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                        record.norms.append(norm.item())
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                record.losses.append(loss.item())
                if folder is not None and len(record.norms) == steps // 2:
                    self.accelerator.save_state(str(folder))
                    folder = None
                if len(record.norms) == steps:
                    return

    def evaluate(self) -> dict[str, torch.Tensor]:
        """Logits and the loss, from the logits, of all rows."""
        self.model.eval()
        logits, labels = [], []
        for batch in self.held_out:
            with torch.no_grad():
                found = self.model(**batch).logits
            for kept, values in zip((logits, labels), (found, batch["labels"]), strict=True):
                kept.append(self.accelerator.gather_for_metrics(values))
        self.model.train()
        whole, targets = torch.cat(logits), torch.cat(labels)
        return {"loss": causal_loss(whole, targets, whole.shape[-1]), "logits": whole}


def run(
    rank: int, ranks: int, folder: str, steps: int, resume: Any = None, **options: Any
) -> Record:
    """Trains, evaluates, and resumes in the middle; `resume` are options of the resumed run."""
    forget_accelerator()
    loop, record = Loop(ranks, **options), Record()
    loop.train(record, steps, Path(folder))
    record.weights, record.evaluation = whole_weights(loop.model), loop.evaluate()
    again, rest = Loop(ranks, **(resume or options)), Record()
    again.accelerator.load_state(folder)
    again.train(rest, steps - steps // 2)
    record.resumed = whole_weights(again.model)
    loop.accelerator.save_model(loop.model, folder + "-model")
    return record
