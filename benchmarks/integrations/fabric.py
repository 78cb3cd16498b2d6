"""A loop of Lightning Fabric on one process, and under plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning import Fabric
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

from benchmarks.integrations.record import Record, quieten, whole_weights
from benchmarks.integrations.task import (
    BATCH,
    VOCABULARY,
    causal_loss,
    collate,
    make_model,
    make_rows,
)


class Loop:
    """A training script with Fabric, written for one process; under autopar on several ranks."""

    def __init__(self, ranks: int, **options: Any) -> None:
        more: dict[str, Any] = {}
        if ranks > 1:
            from autopar.integrations.lightning import AutoparFabricStrategy

            more = {"strategy": AutoparFabricStrategy(**options)}
        self.fabric = Fabric(accelerator="cpu", devices=ranks, **more)
        self.fabric.launch()
        torch.manual_seed(1)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        self.data, self.held_out = self.fabric.setup_dataloaders(
            *(
                DataLoader(rows, BATCH // ranks, shuffle=shuffle, collate_fn=collate)  # type: ignore[arg-type]
                for rows, shuffle in ((make_rows(22, 0), True), (make_rows(9, 1), False))
            )
        )
        self.rng = torch.get_rng_state()

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "rng": self.rng,
            "batches": 0,
        }

    def train(self, record: Record, steps: int, file: Path | None = None, skip: int = 0) -> None:
        """Trains for some steps of the optimizer; saves the state in the middle."""
        number = 0
        while True:
            rng = torch.get_rng_state()
            for place, batch in enumerate(self.data):
                if place < skip:
                    continue
                number += 1
                accumulates = number % 2 == 1
                with self.fabric.no_backward_sync(self.model, enabled=accumulates):
                    labels = batch.pop("labels")
                    loss = causal_loss(self.model(**batch).logits, labels, VOCABULARY)
                    self.fabric.backward(loss / 2)
                record.losses.append(loss.item())
                if accumulates:
                    continue
                norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
                record.norms.append(norm.item())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                if file is not None and len(record.norms) == steps // 2:
                    self.fabric.save(file, {**self.state, "rng": rng, "batches": place + 1})
                    file = None
                if len(record.norms) == steps:
                    return
            skip = 0

    def resume(self, record: Record, steps: int, file: Path) -> None:
        """Goes on from a saved state."""
        state = self.state
        self.fabric.load(file, state)
        torch.set_rng_state(state["rng"])
        self.train(record, steps, skip=state["batches"])

    def evaluate(self) -> dict[str, torch.Tensor]:
        """Logits and the loss, from the logits, of all rows."""
        self.model.eval()
        found, labels = [], []
        with torch.no_grad():
            for batch in self.held_out:
                labels.append(batch.pop("labels"))
                found.append(self.model(**batch).logits)
        self.model.train()
        logits = torch.cat(found)
        return {"loss": causal_loss(logits, torch.cat(labels), VOCABULARY), "logits": logits}


def run(
    rank: int, ranks: int, folder: str, steps: int, resume: Any = None, **options: Any
) -> Record:
    """Trains, evaluates, and resumes in the middle under the options of `resume`."""
    quieten()
    loop, record, file = Loop(ranks, **options), Record(), Path(folder, "middle.ckpt")
    loop.train(record, steps, file)
    record.weights, record.evaluation = whole_weights(loop.model), loop.evaluate()
    again = Loop(ranks, **(resume or options))
    again.resume(Record(), steps - steps // 2, file)
    record.resumed = whole_weights(again.model)
    return record
