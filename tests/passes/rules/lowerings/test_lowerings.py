"""Custom lowerings: their traffic, and low precision."""

import pytest
import torch

from autopar.core.ir.placement import OpStrategy
from autopar.core.operators.attention import attention, attention_backward
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.lowerings.registry import CUSTOM_LOWERINGS, lowering_loops
from autopar.passes.rules.proof.oracle import is_correct, run_operator
from tests.passes.rules.samples import loop_strategies

aten = torch.ops.aten
ROWS, CLASSES, RANKS = 6, 12, 3


def split(name: str, target: object, *args: object) -> tuple[Operator, OpStrategy]:
    """An operator and its first strategy with a lowering."""
    made = Operator(target, args, {}, ())
    operator = Operator(target, args, {}, run_operator(made))
    return operator, next(
        w for w in loop_strategies(lowering_loops(operator), RANKS) if w.lowering == name
    )


def test_a_sharded_vocabulary_sends_no_logits() -> None:
    logits = torch.rand(ROWS, CLASSES)
    targets = torch.randint(0, CLASSES, (ROWS,))
    row = ROWS * logits.element_size()
    steps = {
        "embedding": (aten.embedding.default, torch.rand(CLASSES, 4), targets),
        "log_softmax": (aten._log_softmax.default, logits, 1, False),
        "nll_loss": (aten.nll_loss_forward.default, logits, targets, None, 1, -100),
        "log_softmax_backward": (
            aten._log_softmax_backward_data.default,
            logits,
            logits,
            1,
            torch.float32,
        ),
    }
    sent = {
        name: CUSTOM_LOWERINGS[name].traffic(*split(name, *call), RANKS)
        for name, call in steps.items()
    }
    assert sent == {
        "embedding": (),
        "log_softmax": (("all_reduce", row), ("all_reduce", row)),
        "nll_loss": (),
        "log_softmax_backward": (("all_reduce", row),),
    }


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_bfloat16_is_summed_in_float32(name: str) -> None:
    x = torch.randn(ROWS, 3 * 512).bfloat16()
    target = getattr(aten, f"_{name}").default
    operator, op_strategy = split(name, target, x, 1, False)
    assert is_correct(operator, op_strategy, RANKS)
    assert CUSTOM_LOWERINGS[name].traffic(operator, op_strategy, RANKS)[0] == (
        "all_reduce",
        4 * ROWS,
    )


@pytest.mark.parametrize(
    ("heads", "shared", "ranks"), [(4, 2, 4), (8, 2, 4), (6, 2, 3), (6, 3, 3), (4, 1, 2)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_more_ranks_than_key_heads_divide_attention(
    heads: int, shared: int, ranks: int, causal: bool
) -> None:
    """Ranks of 6 / 3 = 2 query heads read parts of the key heads that 3 of them share."""
    torch.manual_seed(0)
    q = torch.randn(2, heads, 5, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, shared, 5, 4, dtype=torch.float64)
    call = (0.0, causal, None, [])
    results = attention(q, k, v, None, *call)
    for target, args in (
        (attention, (q, k, v, None, *call)),
        (attention_backward, (torch.randn_like(q), q, k, v, None, *results, False, *call)),
    ):
        operator = Operator(target, args, {}, run_operator(Operator(target, args, {}, ())))
        found = loop_strategies(lowering_loops(operator), ranks)
        (ours,) = (w for w in found if w.lowering == "attention_query_heads")
        assert is_correct(operator, ours, ranks), ours
        assert CUSTOM_LOWERINGS[ours.lowering].traffic(operator, ours, ranks) == ()
