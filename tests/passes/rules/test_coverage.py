"""Sixteen architectures: every operator has a rule, and partitions equal one device.

Dropout is on: sharded random numbers are those of one device.
"""

import warnings
from collections import Counter
from operator import getitem

import pytest
import torch

from autopar.core.ir.placement import Shard
from autopar.passes.rules.registry import is_supported
from autopar.planner.placement.unmeasured import partition_by_bytes
from tests.harness.architectures import ARCHITECTURES
from tests.passes.partitions import captured, partitioned, whole

pytest.importorskip("transformers", reason="transformers is a test extra: pip install .[test]")

ROWS, RANKS, EXACT = 5, 2, 1e-9  # an odd number of rows, so that other dims are sharded
ZERO = 1e-9  # smaller gradients are rounding: biases of keys have none
COVERED: Counter[str] = Counter()


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_operator_has_a_rule_and_the_partition_is_exact(name: str) -> None:
    warnings.simplefilter("ignore")
    architecture = ARCHITECTURES[name]
    batch = ((), architecture.batch(ROWS))
    graph, values = captured(architecture.make(dropout=0.1), batch, RANKS)
    operators = Counter(node.target for node in graph.calls() if node.target is not getitem)
    assert not [str(target) for target in operators if not is_supported(target)]
    COVERED.update(map(str, operators))
    op_strategies = partition_by_bytes(graph, RANKS)
    lowerings = Counter(s.lowering for _, s in op_strategies if s.lowering)
    shards = sum(
        isinstance(p, Shard) for _, op_strategy in op_strategies for p in op_strategy.results
    )
    print(f"{name}: {len(operators)} operators, {shards} values sharded, {dict(lowerings)}")
    assert shards
    torch.manual_seed(0)
    want = whole(graph, values)
    torch.manual_seed(0)
    for role, made in partitioned(graph, RANKS, op_strategies, values).items():
        assert made is not None, f"ranks disagree about {role}"
        got, true = made.double(), want[role].double()
        assert (got - true).norm() <= EXACT * max(true.norm().item(), ZERO), role


def test_total() -> None:
    print(f"{len(COVERED)} operators in {len(ARCHITECTURES)} architectures, none without a rule")
    assert not COVERED or len(COVERED) >= 100
