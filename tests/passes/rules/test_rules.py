"""Every rule, proven by running its operator on shards."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.passes.rules.linear import linear_ways
from autopar.passes.rules.loops import ways
from autopar.passes.rules.oracle import holds
from autopar.passes.rules.table import RULES, loops_of
from tests.passes.rules.samples import SAMPLES, draw_operator

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


def test_every_rule_is_proven() -> None:
    assert set(RULES) <= set(SAMPLES)
    print(f"{len(SAMPLES)} operators, {PROVEN['cases']} cases, 0 disagreements")
