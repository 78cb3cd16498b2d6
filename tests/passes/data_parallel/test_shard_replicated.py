"""Parameters that an axis replicates, sharded over it: the ranks together are one device."""

from glob import escape

import pytest
import torch

from autopar.core.ir.placement import Replicate
from autopar.core.ir.roles import Gradient, Parameter
from autopar.core.plan.partition import Partition
from autopar.passes.core.collective_ops import axis_of, kind_of, starts, tagged
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.shard_replicated import ShardReplicated
from autopar.passes.rules.proof.oracle import is_close, shard_tensor, unshard
from autopar.passes.rules.proof.spmd_interpreter import run_spmd
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis
from autopar.planner.evaluate.zero_shards import shard_replicated
from autopar.planner.placement.unmeasured import partition_by_bytes
from tests.harness.models import MODELS
from tests.harness.reference import to_dtype
from tests.passes.partitions import captured, module_of, whole

AXIS = "tp"
"""Name of the axis of `captured`; it divides activations alone, as cp does."""


@pytest.mark.parametrize(
    ("name", "ranks", "stage"), [("gpt", 2, 3), ("gpt", 3, 2), ("uneven", 2, 3), ("conv", 2, 1)]
)
def test_ranks_equal_one_device(name: str, ranks: int, stage: int) -> None:
    case = MODELS[name]
    batch = to_dtype(case.batch(6, 0), torch.float64)
    graph, values = captured(case.make().double(), batch, ranks)
    pins = {escape(parameter): Replicate() for parameter in graph.parameters}
    strategies = partition_by_bytes(graph, ranks, pins)
    trained = [info for info in graph.parameters.values() if info.requires_grad]
    (cp,) = shard_replicated([Partition("cp", ranks)], trained)
    layouts = dict(cp.zero)
    assert len(layouts) > len(trained) / 2
    stages = tuple((info.block, stage) for info in trained)
    graphs = [
        run_passes(
            graph,
            [
                PartitionAxis(AXIS, rank, strategies),
                ShardReplicated(AXIS, rank, stages, cp.zero_dims),
            ],
        )
        for rank in range(ranks)
    ]
    kinds = [kind_of(start) for start in starts(graphs[0]) if start.meta.get("summed")]
    assert "reduce_scatter" in kinds
    gathered = [name for s in starts(graphs[0]) for name in tagged(s, "gathered")]
    assert set(gathered) == set(layouts)
    assert (len(gathered) > len(layouts)) == (stage == 3)  # again in the backward
    assert {axis_of(start) for start in starts(graphs[0])} == {AXIS}

    def placement(role: object) -> object:
        of = role.of if isinstance(role, Gradient) else role
        return layouts.get(of.name, Replicate()) if isinstance(of, Parameter) else Replicate()

    parts = [shard_tensor(values[r], placement(r), ranks) for r in graph.inputs]  # type: ignore[arg-type]
    results = run_spmd([module_of(each) for each in graphs], list(zip(*parts, strict=True)))
    want = whole(graph, values)
    for role, of_ranks in zip(graph.outputs, zip(*results, strict=True), strict=True):
        if of_ranks[0] is not None:
            together = unshard(of_ranks, placement(role))  # type: ignore[arg-type]
            assert together is not None, f"ranks disagree about {role}"
            assert is_close(together, want[role]), role
