"""Custom lowerings: their traffic, and low precision."""

import pytest
import torch

from autopar.ir.placement import OpStrategy
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
