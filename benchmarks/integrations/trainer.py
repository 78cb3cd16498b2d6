"""`transformers.Trainer` on one process, and under plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.integrations.record import Record, forget_accelerator, whole_weights
from benchmarks.integrations.task import BATCH, collate, make_model, make_rows


class Log(TrainerCallback):
    """Keeps what a trainer logs."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "grad_norm" in logs:
            self.steps.append(dict(logs))


def settings_of(folder: Path, ranks: int, steps: int) -> dict[str, Any]:
    """Settings for a batch of `BATCH` rows."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH // ranks,
        "per_device_eval_batch_size": BATCH // ranks,
        "gradient_accumulation_steps": 2,
        "max_steps": steps,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_steps": steps // 2,
        "seed": 3,
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "report_to": [],
    }


def make_trainer(folder: Path, ranks: int, steps: int, **options: Any) -> Trainer:
    """A trainer on the task; under autopar if there are several ranks."""
    kind: Any = Trainer
    if ranks > 1:
        from autopar.integrations.transformers import AutoparTrainer as kind
    return kind(
        model=make_model(),
        args=TrainingArguments(**settings_of(folder, ranks, steps)),
        train_dataset=make_rows(22, 0),
        eval_dataset=make_rows(9, 1),
        data_collator=collate,
        **options,
    )


def run(
    rank: int,
    ranks: int,
    folder: str,
    steps: int,
    resume: Any = None,
    make: Callable[..., Trainer] = make_trainer,
    **options: Any,
) -> Record:
    """Trains, evaluates, predicts, and resumes in the middle.

    Args:
        folder: folder of checkpoints, the same on every rank.
        resume: options of the resumed run; None for those of the first.
        make: makes a trainer.
        options: arguments of the trainer.
    """
    forget_accelerator()
    trainer, log = make(Path(folder), ranks, steps, **options), Log()
    trainer.add_callback(log)
    trainer.train()
    record = Record([x["loss"] for x in log.steps], [x["grad_norm"] for x in log.steps])
    record.weights = whole_weights(trainer.model)
    flos = torch.tensor(float(trainer.state.total_flos))
    record.evaluation = {"flos": flos, "loss": torch.tensor(trainer.evaluate()["eval_loss"])}
    found: Any = trainer.predict(trainer.eval_dataset).predictions
    record.evaluation["logits"] = torch.as_tensor(found)
    again = make(Path(folder), ranks, steps, **(resume or options))
    again.train(resume_from_checkpoint=str(Path(folder, f"checkpoint-{steps // 2}")))
    record.resumed = whole_weights(again.model)
    return record
