"""Fine-tune with the Trainer of transformers; only its class changes.

torchrun --nproc-per-node 2 examples/trainer.py
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from autopar.integrations.transformers import AutoparTrainer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--out", default="runs/trainer")
args = parser.parse_args()


class Counting(Dataset):
    """Sequences that count upwards; take a tokenized data set instead."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + torch.arange(32)) % 64
        return {"input_ids": tokens, "labels": tokens}


sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes))
trainer = AutoparTrainer(
    model=model,
    args=TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        warmup_steps=10,
        logging_steps=10,
        save_steps=50,
        report_to=[],
    ),
    train_dataset=Counting(),
    strategy="zero3",
)
trainer.train()
trainer.save_model()
