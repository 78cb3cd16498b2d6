"""Every rule, proven by running its operator on shards."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from autopar.core.ir.graph import tensors
from autopar.core.ir.placement import OpStrategy, Shard
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.lowerings.registry import CUSTOM_LOWERINGS, program
from autopar.passes.rules.operators.partial_linear import linear_strategies
from autopar.passes.rules.proof.oracle import is_correct
from autopar.passes.rules.registry import RULES, loops_of
from tests.passes.rules.samples import SAMPLES, draw_operator, loop_strategies

aten = torch.ops.aten
PROVEN = {"cases": 0}


@pytest.mark.slow
@pytest.mark.parametrize("target", SAMPLES, ids=str)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_strategies_are_correct(target: Any, data: st.DataObject) -> None:
    operator = draw_operator(target, data)
    ranks = data.draw(st.sampled_from([2, 3]), "ranks")
    torch.manual_seed(0)
    for op_strategy in [
        *loop_strategies(loops_of(operator), ranks, (1, 2)),
        *linear_strategies(operator),
    ]:
        assert is_correct(operator, op_strategy, ranks), (
            f"{operator.target} by {op_strategy} over {ranks} ranks"
        )
        if op_strategy.lowering and is_even(
            operator, op_strategy, ranks
        ):  # so that another axis can divide it alike
            programs = {
                shapes(program(operator, op_strategy, ranks, rank)) for rank in (0, ranks - 1)
            }
            assert len(programs) == 1, f"{operator.target} by {op_strategy} differs between ranks"
        PROVEN["cases"] += 1


def is_even(operator: Operator, op_strategy: OpStrategy, ranks: int) -> bool:
    """Whether all ranks have shards of equal size."""
    values, placements = (
        (*operator.operands, *operator.results),
        (*op_strategy.operands, *op_strategy.results),
    )
    return all(
        t.shape[p.dim] % ranks == 0
        for t, p in zip(values, placements, strict=True)
        if t is not None and isinstance(p, Shard)
    )


def shapes(graph: fx.Graph) -> str:
    """The operators of a program by name, with the shapes of their results."""
    return str([(node.name, [t.shape for t in tensors(node)]) for node in graph.nodes])


UNPROVEN = {
    aten.empty.memory_format,
    aten.new_empty.default,
    aten._fused_rms_norm_backward.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
}
"""Operators without numbers to compare, or without a kernel for CPUs."""


def test_every_rule_is_proven() -> None:
    lowered = {t for lowering in CUSTOM_LOWERINGS.values() for t in lowering.targets}
    assert (lowered | set(RULES)) - UNPROVEN <= set(SAMPLES)
    print(f"{len(SAMPLES)} operators, {PROVEN['cases']} cases, 0 disagreements")
