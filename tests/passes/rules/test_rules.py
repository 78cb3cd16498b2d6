"""Every rule, proven by running its operator on shards."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.passes.rules.linear import linear_ways
from autopar.passes.rules.loops import ways
from autopar.passes.rules.oracle import holds
from autopar.passes.rules.own import OWN
from autopar.passes.rules.table import RULES, loops_of
from tests.passes.rules.samples import SAMPLES, draw_operator

aten = torch.ops.aten
PROVEN = {"cases": 0}


@pytest.mark.parametrize("target", SAMPLES, ids=str)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_ways_hold(target: Any, data: st.DataObject) -> None:
    operator = draw_operator(target, data)
    ranks = data.draw(st.sampled_from([2, 3]), "ranks")
    torch.manual_seed(0)
    for way in [*ways(loops_of(operator), ranks, (1, 2)), *linear_ways(operator)]:
        assert holds(operator, way, ranks), f"{operator.target} by {way} over {ranks} ranks"
        PROVEN["cases"] += 1


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
"""Without numbers to compare, or without a kernel for CPUs."""


def test_every_rule_is_proven() -> None:
    known = {*RULES, *(target for own in OWN.values() for target in own.targets)}
    assert known - UNPROVEN <= set(SAMPLES)
    print(f"{len(SAMPLES)} operators, {PROVEN['cases']} cases, 0 disagreements")
