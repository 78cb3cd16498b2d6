"""Sums of gradients along an axis travel together, and stay what they were."""

from dataclasses import replace

import torch
from torch import fx

import autopar
from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.placement import OpStrategy, Replicate, Shard
from autopar.core.ir.roles import Parameter
from autopar.passes.communication.bucket_tp_gradients import BucketTpGradients
from autopar.passes.communication.lower_collectives import LowerCollectives
from autopar.passes.core.collective_ops import (
    results_of,
    start_all_reduce,
    start_reduce_scatter,
    starts,
    wait,
)
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline import build_pass_pipeline
from autopar.passes.rules.proof.oracle import is_close
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis
from autopar.planner.placement.unmeasured import partition_by_bytes
from autopar.runtime.codegen.program import with_axes
from tests.harness.models import MODELS
from tests.harness.reference import to_dtype
from tests.harness.training import fixed
from tests.passes.meshes import PlannedRanks
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


def test_few_sums_are_under_way_where_one_bucket_over_dp_reads_them_all() -> None:
    """A sum holds its whole gradient until it is awaited, so none waits for the bucket."""
    case = MODELS["gpt"]
    strategy = fixed(1, tp=2, placements={"*": Replicate()}, reduce_bytes=LARGE)
    model, inputs = case.make().double(), case.batch(4, 0)[0]
    plan = autopar.plan(model, 4, example_inputs=inputs, strategy=strategy)
    plan = replace(
        plan, partitions=tuple(replace(each, bucket_bytes=1) for each in plan.partitions)
    )
    it = PlannedRanks(model, inputs, plan)
    passes = build_pass_pipeline(plan, 0, it.backend, op_strategies=it.op_strategies)
    before, _ = passes.split(LowerCollectives)
    graph = run_passes(with_axes(it.capture(0), plan), before)
    under_way = most = 0
    for node in graph.calls():
        if node in sums(graph):
            most = max(most, under_way := under_way + 1)
        elif node.target is wait and "summed" in node.args[0].meta:  # type: ignore[union-attr]
            under_way -= 1
    assert most <= plan.in_flight + 1 < len(sums(graph))
    assert max(it.errors().values()) < 1e-9


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
