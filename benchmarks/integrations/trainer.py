"""`transformers.Trainer` and `trl.SFTTrainer` on one process, and under plans."""

from __future__ import annotations

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


def make_trainer(folder: Path, ranks: int, steps: int, **options: Any) -> tuple[Any, Log]:
    """A trainer over a batch of `BATCH` rows; under autopar if there are several ranks."""
    log = Log()
    settings = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH // ranks,
        per_device_eval_batch_size=BATCH // ranks,
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=steps // 2,
        seed=3,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        report_to=[],
    )
    kind: Any = Trainer
    if ranks > 1:
        from autopar.integrations.transformers import AutoparTrainer as kind
    data = {"train_dataset": make_rows(22, 0), "eval_dataset": make_rows(9, 1)}
    given = {"args": settings, "data_collator": collate, "callbacks": [log], **data, **options}
    return kind(model=make_model(), **given), log


def run(
    rank: int,
    ranks: int,
    folder: str,
    steps: int,
    resume: Any = None,
    **options: Any,
) -> Record:
    """Trains, evaluates, predicts, and resumes in the middle.

    Args:
        folder: folder of checkpoints, the same on every rank.
        resume: options of the resumed run; None for those of the first.
        options: arguments of the trainer.
    """
    forget_accelerator()
    trainer, log = make_trainer(Path(folder), ranks, steps, **options)
    trainer.train()
    record = Record([x["loss"] for x in log.steps], [x["grad_norm"] for x in log.steps])
    record.weights = whole_weights(trainer.model)
    record.evaluation = {"loss": torch.tensor(trainer.evaluate()["eval_loss"])}
    record.evaluation["logits"] = torch.tensor(trainer.predict(make_rows(9, 1)).predictions)
    again, _ = make_trainer(Path(folder), ranks, steps, **(resume or options))
    again.train(resume_from_checkpoint=str(Path(folder, f"checkpoint-{steps // 2}")))
    record.resumed = whole_weights(again.model)
    return record
