"""Models of what large runs divide: experts, a long row, a large vocabulary.

    python -m benchmarks.regret --models benchmarks.regret.scale_models --contenders \\
        "tp4,ep4 by dispatch,ep4 gathered"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import autopar
from benchmarks.models import Case, next_tokens
from benchmarks.regret.models import gpt
from benchmarks.regret.plans import FIXED

ENTRIES = 512  # of a small vocabulary
LONG = 2048  # tokens of the long row
TOKENS, ROWS = 128, 16

plain = partial(FIXED, recompute="none")


class Mixture(nn.Module):
    """Mixtral with 8 experts of 1.6 million parameters in each of its 2 layers."""

    def __init__(self) -> None:
        super().__init__()
        config = MixtralConfig(
            vocab_size=ENTRIES,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=8,
            num_experts_per_tok=2,
            use_cache=False,
        )
        self.model = MixtralForCausalLM(config)

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers that `fully_shard` wraps."""
        return self.model.model.layers

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of predicting `y`, the tokens that follow those of `x`."""
        logits = self.model(x).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def of_experts(ranks: int) -> Mapping[str, autopar.Strategy]:
    """Experts divided over ranks, with tokens sent to their experts or gathered."""
    found = {
        f"ep{ranks} by dispatch": plain(ep=ranks, zero=0, route_experts=True),
        f"ep{ranks} gathered": plain(ep=ranks, zero=0, route_experts=False),
    }
    if ranks == 4:
        found["ep2 by dispatch, zero3"] = plain(ep=2, zero=3, route_experts=True)
    return found


def of_long_rows(ranks: int) -> Mapping[str, autopar.Strategy]:
    """One row divided over ranks, whose attention goes by a ring or an all-to-all."""
    return {
        f"cp{ranks} by a ring": plain(cp=ranks, zero=0, ring_attention=True),
        f"cp{ranks} by all-to-all": plain(cp=ranks, zero=0, ring_attention=False),
    }


def of_many_words(ranks: int) -> Mapping[str, autopar.Strategy]:
    """Data parallelism with the loss in chunks."""
    return {
        "zero0, 8 chunks": plain(zero=0, loss_chunks=8),
        "zero3, 8 chunks": plain(zero=3, loss_chunks=8),
    }


LONG_ROW = replace(
    gpt("long-row", 2, 128, ENTRIES, length=LONG),
    batch=partial(next_tokens, rows=1, vocabulary=ENTRIES, tokens=LONG),
    search=("tp", "cp"),
    strategies=of_long_rows,
)

CASES = {
    case.name: case
    for case in (
        Case(
            "mixture",
            Mixture,
            partial(next_tokens, rows=ROWS, vocabulary=ENTRIES, tokens=TOKENS),
            search=("tp", "ep"),
            strategies=of_experts,
        ),
        LONG_ROW,
        replace(gpt("words", 2, 256, 8192, tied=False), strategies=of_many_words),
    )
}
"""2 to 14 million parameters each."""
