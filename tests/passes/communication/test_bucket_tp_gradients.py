"""Sums of gradients along an axis travel together, and stay what they were."""

import torch
from torch import fx

from autopar.ir.graph import TrainingGraph, tensors
from autopar.ir.placement import OpStrategy, Replicate, Shard
from autopar.ir.roles import Parameter
from autopar.passes.communication.bucket_tp_gradients import BucketTpGradients
from autopar.passes.core.collective_ops import (
    results_of,
    start_all_reduce,
    start_reduce_scatter,
    starts,
)
from autopar.passes.core.runner import run_passes
from autopar.passes.rules.proof.oracle import is_close
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis
from autopar.planner.placement.unmeasured import partition_by_bytes
from tests.harness.models import MODELS
from tests.harness.reference import to_dtype
from tests.passes.partitions import AXIS, captured, partitioned, whole

RANKS = 2
LARGE = 1 << 30


def sums(graph: TrainingGraph) -> list[fx.Node]:
    return [start for start in starts(graph) if "summed" in start.meta]


def test_sums_travel_together() -> None:
    """Rows are divided and parameters whole, but for one whose gradient is scattered."""
    case = MODELS["gpt"]
    batch = to_dtype(case.batch(4, 0), torch.float64)
    graph, values = captured(case.make().double(), batch, RANKS)
    op_strategies = partition_by_bytes(graph, RANKS, {"*": Replicate()})
    apart = run_passes(graph, [PartitionAxis(AXIS, 1, op_strategies)])
    name = next(s.meta["summed"] for s in sums(apart) if tensors(s)[0].dim() == 2)
    scattered = graph.placeholder(Parameter(name))
    assert scattered is not None
    op_strategies = (*op_strategies, (scattered.name, OpStrategy((), (Shard(1),))))
    apart = run_passes(graph, [PartitionAxis(AXIS, 1, op_strategies)])
    one, many = (run_passes(apart, [BucketTpGradients(AXIS, size)]) for size in (LARGE, 4_000))
    kinds = {start.target for start in sums(apart)}
    assert kinds == {start_all_reduce, start_reduce_scatter}
    others = len(list(starts(apart))) - len(sums(apart))
    counts = [len(list(starts(it))) - others for it in (one, many, apart)]
    assert len(kinds) == counts[0] < counts[1] < counts[2]
    want = whole(graph, values)
    for size in (LARGE, 4_000):
        found = partitioned(graph, RANKS, op_strategies, values, BucketTpGradients(AXIS, size))
        for role, made in found.items():
            assert made is not None, f"ranks disagree about {role}"
            assert is_close(made, want[role]), role


def test_sums_that_are_read_stay() -> None:
    """A sum that the step itself goes on with cannot wait for others."""
    case = MODELS["gpt"]
    graph, _ = captured(case.make(), case.batch(4, 0), RANKS)
    op_strategies = partition_by_bytes(graph, RANKS, {"*": Replicate()})
    apart = run_passes(graph, [PartitionAxis(AXIS, 0, op_strategies)])
    for start in sums(apart):
        (result,) = results_of(start)
        assert result is not None
        with apart.graph.inserting_after(result):
            read = apart.graph.call_function(torch.ops.aten.neg.default, (result,))
        read.meta = dict(result.meta)
    kept = run_passes(apart, [BucketTpGradients(AXIS, LARGE)])
    assert len(sums(kept)) == len(sums(apart))
