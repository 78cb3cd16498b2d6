"""`Run`: one script's settings, plain or under a plan, and the data of all scripts."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from autopar.core.plan.strategy import Strategy
from autopar.integrations.transformers import AutoparTrainerMixin

WORDS = tuple(f"w{index}" for index in range(40))


@dataclass(frozen=True)
class Run:
    """A run of a script.

    Attributes:
        folder: folder for what the script writes, the same on every rank.
        ranks: number of processes.
        plan: strategy of autopar; None for the library alone.
    """

    folder: str
    ranks: int = 1
    plan: Strategy | None = None

    def rows(self, batch: int) -> int:
        """Rows that a loader takes for a batch of all ranks, where the loop multiplies them."""
        return batch // self.ranks

    @property
    def split_batches(self) -> dict[str, Any]:
        """Arguments of a trainer whose loaders make the batches of all ranks themselves."""
        return {} if self.plan is None else {"accelerator_config": {"split_batches": True}}

    def trainer(self, kind: type[Any]) -> Any:
        """A trainer of transformers, trl or sentence-transformers, under autopar if planned."""
        if self.plan is None:
            return kind
        planned = type(f"Autopar{kind.__name__}", (AutoparTrainerMixin, kind), {})
        return functools.partial(planned, strategy=self.plan)

    def arguments(self, **settings: Any) -> dict[str, Any]:
        """Arguments of a trainer, for batches of 8 rows of all ranks."""
        batch = 8 if "accelerator_config" in settings else self.rows(8)
        return {
            "output_dir": self.folder,
            "per_device_train_batch_size": batch,
            "per_device_eval_batch_size": batch,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "seed": 3,
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "report_to": [],
            "save_strategy": "no",
            **settings,
        }


def sentences(count: int, seed: int = 0, labels: int = 3) -> Dataset:
    """Sentences of 3 to 9 words, with a label and a score each."""
    generator = torch.Generator().manual_seed(seed)
    texts, classes = [], []
    for _ in range(count):
        length = int(torch.randint(3, 10, (), generator=generator))
        words = torch.randint(0, len(WORDS), (length,), generator=generator).tolist()
        texts.append(" ".join(WORDS[word] for word in words))
        classes.append(words[0] % labels)
    return Dataset.from_dict({"text": texts, "label": classes})


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, with the special tokens of BERT and of decoders."""
    names = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", *WORDS)
    ids = {name: index for index, name in enumerate(names)}
    made = Tokenizer(WordLevel(ids, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=32,
    )


def pictures(count: int, size: int = 16, seed: int = 0) -> list[tuple[Tensor, int]]:
    """Pictures of three channels, with a class of five each."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, 3, size, size, generator=generator, dtype=torch.float64)
    return [(picture, index % 5) for index, picture in enumerate(values)]
