"""Later micro-batches compute with the parameters that the first gathers."""

import pytest
import torch

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import Gradient, Parameter, UnshardedParam
from autopar.core.plan.buckets import Buckets
from autopar.passes.communication.bucket_collectives import BucketCollectives
from autopar.passes.communication.lower_collectives import LowerCollectives
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.assign_batch_axis import AssignBatchAxis
from autopar.passes.data_parallel.cast_before_gather import CastBeforeGather
from autopar.passes.data_parallel.shard_parameters import ShardParameters
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from autopar.passes.split_forward_backward import split_forward_backward
from autopar.passes.stage_lowering import export_gathered, import_gathered
from tests.passes.golden import TwoLayers, order, two_layers
from tests.passes.parity import AXIS, World
from tests.passes.simulated import run_ranks

NAMES = ("blocks.0.weight", "blocks.1.weight")


def lowered(rank: int, zero: dict[str, int], it: World) -> TrainingGraph:
    passes = [
        AssignBatchAxis(AXIS),
        ShardParameters(AXIS, rank, tuple(zero.items())),
        CastBeforeGather(),
        SynchronizeGradients(AXIS, rank),
        BucketCollectives(Buckets(gather=(NAMES,))),
        LowerCollectives("gloo", rank, AXIS),
    ]
    return run_passes(it.graph(rank), passes)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_later_micro_batches_compute_the_same_without_gathering(dtype: torch.dtype) -> None:
    """Under autocast to bf16, the first gathers parameters in bf16."""
    it, zero = two_layers(), {"": 0, "blocks.0": 1, "blocks.1": 2}
    if dtype == torch.bfloat16:
        it = World(TwoLayers(), ((it.leaves[0].float(),), {}), 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        graphs = [lowered(rank, zero, it) for rank in range(2)]
    firsts, laters = (
        [turn(g, zero) for g in graphs] for turn in (export_gathered, import_gathered)
    )
    given = run_ranks(firsts, [it.values(graph, rank) for rank, graph in enumerate(firsts)])
    for role in map(UnshardedParam, NAMES):
        assert given[0][role].equal(it.state[role.name].to(dtype))  # type: ignore[union-attr]
    came = [it.values(g, r) | {UnshardedParam(n): given[r][UnshardedParam(n)] for n in NAMES}
            for r, g in enumerate(laters)]  # fmt: skip
    found = run_ranks(laters, came)  # type: ignore[arg-type]
    for results, want in zip(found, given, strict=True):
        for name in NAMES:
            role = Gradient(Parameter(name))
            assert results[role].equal(want[role])  # type: ignore[union-attr,arg-type]
    halves = split_forward_backward(laters[0])
    assert not any("all_to_all" in str(node.target) for node in halves.forward.calls())
    before = split_forward_backward(firsts[0]).backward
    assert before is not None
    assert halves.backward is not None
    assert halves.backward.inputs == before.inputs
    assert order(halves.backward) == order(before)


def test_stage_3_is_unchanged() -> None:
    zero = {"": 0, "blocks.0": 3, "blocks.1": 1}
    graph = lowered(0, zero, two_layers())
    given = [
        role for role in import_gathered(graph, zero).inputs if isinstance(role, UnshardedParam)
    ]
    assert given == [UnshardedParam("blocks.1.weight")]
    assert UnshardedParam("blocks.0.weight") not in export_gathered(graph, zero).outputs
