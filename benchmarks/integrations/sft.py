"""`trl.SFTTrainer` on one process, and under plans by the mix-in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from benchmarks.integrations import trainer
from benchmarks.integrations.task import VOCABULARY, collate, make_model, make_rows


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose words are numbers."""
    words = {str(i): i for i in range(VOCABULARY)}
    made = Tokenizer(WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="0", eos_token="2")


def make_trainer(folder: Path, ranks: int, steps: int, **options: Any) -> SFTTrainer:
    """A trainer on the task; under autopar if there are several ranks."""
    kind: Any = SFTTrainer
    if ranks > 1:
        from autopar.integrations.transformers import AutoparTrainerMixin

        kind = type("AutoparSFTTrainer", (AutoparTrainerMixin, SFTTrainer), {})
    settings = trainer.settings_of(folder, ranks, steps)
    return kind(
        model=make_model(),
        args=SFTConfig(max_length=None, gradient_checkpointing=False, bf16=False, **settings),
        train_dataset=Dataset.from_list(make_rows(22, 0)),
        eval_dataset=Dataset.from_list(make_rows(9, 1)),
        processing_class=make_tokenizer(),
        data_collator=collate,
        **options,
    )


run = partial(trainer.run, make=make_trainer)
