"""Gradients under autocast are summed in the dtype of their parameter along partitioned axes."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.roles import Gradient
from autopar.passes.communication.bucket_tp_gradients import BucketTpGradients
from autopar.passes.core.collective_ops import start_all_reduce, starts
from autopar.passes.core.runner import run_passes
from autopar.passes.memory.checkpoint_activations import CheckpointActivations
from autopar.passes.tensor_parallel.cast_before_reduce import CastBeforeReduce
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis
from autopar.planner.placement.unmeasured import partition_by_bytes
from tests.passes.golden import TwoLayers, changes
from tests.passes.partitions import AXIS, Values, captured, partitioned, whole


class Tied(nn.Module):
    """One weight, used twice: its gradient is the sum of two casts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x))).float().square().mean()


def case(model: nn.Module) -> tuple[TrainingGraph, Values]:
    """A call of a model under autocast on 64 rows, many more than its parameters have."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        graph, values = captured(model, ((x,), {}), 2)
    fakes = {r: n.meta["val"] for r, n in zip(graph.inputs, graph.placeholders, strict=True)}
    return graph, {role: value.to(fakes[role].dtype) for role, value in values.items()}


def partitioned_graph(graph: TrainingGraph) -> TrainingGraph:
    return run_passes(graph, [PartitionAxis(AXIS, 0, partition_by_bytes(graph, 2))])


def test_parts_are_cast_and_their_sum_is_not() -> None:
    before = partitioned_graph(case(TwoLayers())[0])
    after = run_passes(before, [CastBeforeReduce()])
    assert_expected_inline(
        changes(before, after),
        """\
+ _to_copy_default_1: [3,2] = _to_copy(t_3, dtype=torch.float32)
+ start_all_reduce_2: [3,2] = start_all_reduce([_to_copy_default_1], tp)
+ wait_5: [3,2] = wait(start_all_reduce_2)
+ getitem_5: [3,2] = getitem(wait_5, 0)
~ permute_default_2: [2,3] = permute(getitem_5, [1, 0])
+ _to_copy_default: [2,3,1,2] = _to_copy(clone_default_3, dtype=torch.float32)
+ start_reduce_scatter_1: [1,3,1,2] = start_reduce_scatter([_to_copy_default], [1], tp)
+ wait_4: [1,3,1,2] = wait(start_reduce_scatter_1)
+ getitem_4: [1,3,1,2] = getitem(wait_4, 0)
~ view_default_1: [3,2] = view(getitem_4, [3, 2])
- start_all_reduce_1: [3,2] = start_all_reduce([t_3], tp)
- wait_2: [3,2] = wait(start_all_reduce_1)
- getitem_2: [3,2] = getitem(wait_2, 0)
- _to_copy_3: [2,3] = _to_copy(t_5, dtype=torch.float32, layout=torch.strided, device=cpu)
- start_reduce_scatter: [1,3,1,2] = start_reduce_scatter([clone_default_3], [1], tp)
- wait_3: [1,3,1,2] = wait(start_reduce_scatter)
- getitem_3: [1,3,1,2] = getitem(wait_3, 0)
- _to_copy_4: [3,2] = _to_copy(t_8, dtype=torch.float32, layout=torch.strided, device=cpu)
-> gradient blocks.0.weight = t_8
-> gradient blocks.1.weight = t_5""",
    )


@pytest.mark.parametrize("model", [TwoLayers, Tied])
def test_gradients_are_sums_in_float32(model: type[nn.Module]) -> None:
    """Each rank's part is rounded to bf16 once, and the sum is not rounded again."""
    graph, values = case(model())
    strategies, want = partition_by_bytes(graph, 2), whole(graph, values)
    narrow = partitioned(graph, 2, strategies, values)
    wide = partitioned(graph, 2, strategies, values, CastBeforeReduce())
    for role in (r for r in graph.outputs if isinstance(r, Gradient)):
        ours, theirs = wide[role], narrow[role]
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == torch.float32
        assert torch.allclose(ours, want[role], rtol=2**-6, atol=2**-8)  # type: ignore[arg-type]
        if role.of.name.endswith("weight"):
            assert not torch.equal(ours, ours.bfloat16().float()), "rounded after the sum"


def test_sums_travel_in_buckets() -> None:
    """Both biases; the weight's sum is copied to another layout before the optimizer reads it."""
    graph, _ = case(TwoLayers(bias=True))
    passes = [CastBeforeReduce(), BucketTpGradients(AXIS, 1 << 20)]
    found = run_passes(partitioned_graph(graph), passes)
    sums = [s for s in starts(found) if s.target is start_all_reduce and "summed" in s.meta]
    assert {tensor.dtype for s in sums for tensor in tensors(s)} == {torch.float32}
    assert sorted(len(tensors(s)) for s in sums) == [1, 2]


def test_float32_is_left_alone() -> None:
    x = torch.randn(64, 4)
    graph, _ = captured(TwoLayers(), ((x,), {}), 2)
    result = CastBeforeReduce()(partitioned_graph(graph))
    assert result.reason == "no gradient is summed before its cast"


class Head(nn.Module):
    """A classifier in bfloat16, whose loss sums over all classes and rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        return ((y * y).sum(0).float() * y.float()).mean()


def test_sums_that_run_again_stay_as_they_were() -> None:
    """They have the forward's dtype. As the optimizer's they would hold up all that reads them."""
    passes = [CheckpointActivations("everything"), CastBeforeReduce()]
    after = run_passes(partitioned_graph(case(Head())[0]), passes)
    sums = [start for start in starts(after) if start.target is start_all_reduce]
    again = [start for start in sums if start.meta.get("recomputed")]
    assert [tensors(start)[0].dtype for start in again] == [torch.bfloat16]
    assert "summed" not in again[0].meta
