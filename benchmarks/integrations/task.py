"""A small language model and its data, alike for all loops."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, LENGTH = 29, 8
BATCH = 6
"""Rows of a batch of all ranks."""


def make_model() -> GPT2LMHeadModel:
    """GPT-2 with two blocks in float64, whose loss is not computed in float32."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).double()
    model.loss_function = causal_loss
    return model


def causal_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The loss of transformers, without its rounding to float32."""
    flat, targets = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    if num_items_in_batch is None:
        return F.cross_entropy(flat, targets)
    return F.cross_entropy(flat, targets, reduction="sum") / num_items_in_batch


def make_rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Rows of several lengths, with several numbers of ignored labels."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        ids = [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(5, LENGTH))]
        ignored = draw.randint(0, 3)
        rows.append({"input_ids": ids, "labels": [-100] * ignored + ids[ignored:]})
    return rows


def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch, padded to one length."""
    return {
        "input_ids": _padded([row["input_ids"] for row in rows], 0),
        "labels": _padded([row["labels"] for row in rows], -100),
        "attention_mask": _padded([[1] * len(row["input_ids"]) for row in rows], 0),
    }


def _padded(rows: Sequence[list[int]], value: int) -> Tensor:
    return torch.tensor([row + [value] * (LENGTH - len(row)) for row in rows])
