"""The loss in chunks where memory is short, and only where logits are large."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cost_model.cluster.cluster import Cluster
from autopar.planner.search.chunked_loss import LOSS_CHUNKS


class LanguageModel(nn.Module):
    """A block between an embedding and a head of many words; returns the loss and logits."""

    def __init__(self, words: int, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.words(x)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        logits = self.head(hidden).float()
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()), logits


def planned(memory: int | None, words: int = 1 << 15, **options: Any) -> autopar.Plan:
    """The plan on eight GPUs, of 2,048 tokens each."""
    with torch.device("meta"):
        model, tokens = LanguageModel(words), torch.zeros(16, 1024, dtype=torch.long)
    return autopar.plan(
        model,
        8,
        example_inputs=(tokens, tokens),
        strategy=autopar.Strategy(zero=3, **options),
        memory=memory,
        precision="bf16",
        cluster=Cluster.named("dgx-h100"),
    )


def needed(plan: autopar.Plan) -> int:
    assert plan.prediction is not None
    return plan.prediction.needed_bytes


def test_chunks_where_memory_is_short() -> None:
    roomy = planned(1 << 36)
    assert roomy.loss_chunks == 1
    short = needed(planned(1 << 36, recompute="full")) * 3 // 4
    plan = planned(short)
    assert plan.loss_chunks in LOSS_CHUNKS
    assert "loss in" in plan.name
    assert needed(plan) <= short < needed(roomy)
    assert any("output 1 of the model is left out" in note for note in plan.notes)
    with pytest.raises(autopar.OutOfMemoryError):
        planned(short, loss_chunks=1)


def test_more_chunks_need_less() -> None:
    sizes = [needed(planned(1 << 36, loss_chunks=count)) for count in (1, *LOSS_CHUNKS)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] // 2


def test_few_words_are_left_whole() -> None:
    with pytest.raises(autopar.OutOfMemoryError):
        planned(1 << 16, words=3)


def test_chunks_leave_the_logits_of_a_pipeline_out() -> None:
    """No rank holds logits of any micro-batch, neither in a prediction nor in training."""
    options = {"pp": 2, "micro_batches": 2, "schedule": "1f1b"}
    whole, lean = (planned(1 << 36, loss_chunks=count, **options) for count in (1, 8))
    assert whole.prediction is not None
    assert lean.prediction is not None
    assert whole.prediction.memory["outputs"]
    assert not lean.prediction.memory["outputs"]
    short = (needed(whole) + needed(lean)) // 2
    plan = planned(short, **options)
    assert plan.loss_chunks in LOSS_CHUNKS
    assert needed(plan) <= short
