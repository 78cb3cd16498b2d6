import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.placement import Shard, shard_dim
from autopar.core.ir.roles import Parameter
from autopar.core.plan.buckets import Buckets
from autopar.passes.communication.bucket_collectives import BucketCollectives
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.assign_batch_axis import AssignBatchAxis
from autopar.passes.data_parallel.cast_before_gather import CastBeforeGather
from autopar.passes.data_parallel.shard_parameters import ShardParameters
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from tests.passes.golden import TwoLayers, changes, two_layers
from tests.passes.parity import AXIS, EXACT, World, assert_parity


def stages(*of_blocks: int) -> tuple[tuple[str, int], ...]:
    return (("", 0), *((f"blocks.{i}", stage) for i, stage in enumerate(of_blocks)))


def sharded(rank: int, *of_blocks: int) -> tuple[TrainingGraph, TrainingGraph]:
    before = run_passes(two_layers().graph(rank), [AssignBatchAxis(AXIS)])
    return before, run_passes(before, [ShardParameters(AXIS, rank, stages(*of_blocks))])


def test_stage_1_and_2_gather_once() -> None:
    assert_expected_inline(
        changes(*sharded(0, 0, 2)),
        """\
~ blocks.1.weight: [1,3] S(0)
+ start_all_gather: [2,3] R = start_all_gather([blocks.1.weight], [2], dp)
+ wait_1: [2,3] R = wait(start_all_gather)
+ getitem_1: [2,3] R = getitem(wait_1, 0)
~ t_1: [3,2] R = t(getitem_1)""",
    )


def test_stage_3_gathers_again_for_the_backward() -> None:
    """The backward computes the norm of the weight again."""
    it = World(Normalised().double(), two_layers().batch, 2)
    before = run_passes(it.graph(0), [AssignBatchAxis(AXIS)])
    after = run_passes(before, [ShardParameters(AXIS, 0, stages(3, 0))])
    assert_expected_inline(
        changes(before, after),
        """\
~ blocks.0.weight: [2,4] S(0)
+ start_all_gather: [4,4] R = start_all_gather([blocks.0.weight], [4], dp)
+ wait_1: [4,4] R = wait(start_all_gather)
+ getitem_1: [4,4] R = getitem(wait_1, 0)
~ linalg_vector_norm: [] R = linalg_vector_norm(getitem_1)
~ div: [4,4] R = div(getitem_1, linalg_vector_norm)
+ start_all_gather_1: [4,4] R = start_all_gather([blocks.0.weight], [4], dp)
+ wait_2: [4,4] R = wait(start_all_gather_1)
+ getitem_2: [4,4] R = getitem(wait_2, 0)
+ linalg_vector_norm_1: [] R = linalg_vector_norm(getitem_2)
~ div_2: [4,4] R = div(getitem_2, linalg_vector_norm_1)
~ div_3: [4,4] R = div(div_2, linalg_vector_norm_1)
~ div_4: [4,4] P(sum) = div(t_5, linalg_vector_norm_1)
~ div_5: [4,4] R = div(getitem_2, linalg_vector_norm_1)
~ eq: [] R = eq(linalg_vector_norm_1, 0)""",
    )


def test_the_last_rank_has_the_short_chunk() -> None:
    assert_expected_inline(
        changes(*sharded(1, 2, 0)),
        """\
~ blocks.0.weight: [1,4] S(0)
+ start_all_gather: [3,4] R = start_all_gather([blocks.0.weight], [3], dp)
+ wait_1: [3,4] R = wait(start_all_gather)
+ getitem_1: [3,4] R = getitem(wait_1, 0)
~ t: [4,3] R = t(getitem_1)""",
    )


def test_layouts_are_recorded() -> None:
    _, after = sharded(0, 3, 0)
    assert dict(after.layouts) == {"blocks.0.weight": Shard(0)}
    node = after.placeholder(Parameter("blocks.0.weight"))
    assert node is not None
    assert node.meta["val"].shape == (2, 4)


class Normalised(TwoLayers):
    """The backward reads values that depend on the weight; the last layer is frozen."""

    def __init__(self) -> None:
        super().__init__(width=4)
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.blocks[0].weight
        hidden = x @ (weight / weight.norm()).t()
        return self.blocks[1](torch.tanh(hidden)).square().mean()


class NormalisedTwice(Normalised):
    """The backward reads the norm last, and first values that depend on it."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.blocks[0].weight
        unit = weight / weight.norm()
        hidden = torch.tanh(x @ unit.t()) @ unit.exp()
        return self.blocks[1](torch.tanh(hidden)).square().mean()


class Experts(TwoLayers):
    """A few matrices in one parameter, and layers."""

    def __init__(self) -> None:
        super().__init__(width=6)
        self.experts = torch.nn.Parameter(torch.randn(2, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.blocks[0](x)) @ self.experts
        return self.blocks[1](hidden.sum(0)).square().mean()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [1, 1 << 20])
@pytest.mark.parametrize("dtype", ["", "float32"])
def test_any_dim_may_be_sharded(stage: int, nbytes: int, dtype: str) -> None:
    """In one bucket with parameters that are sharded on dim 0, and between casts."""
    it = World(Experts().double(), two_layers(rows=7).batch, 3)
    dims = (("experts", 1), ("blocks.1.weight", 1))
    graphs = it.lower(
        lambda rank: (
            AssignBatchAxis(AXIS),
            ShardParameters(AXIS, rank, (("", stage), *stages(stage, stage)[1:]), dims),
            CastBeforeGather(),
            SynchronizeGradients(AXIS, rank, dtype=dtype),
            BucketCollectives(Buckets(), (nbytes, nbytes)),
        )
    )
    assert graphs[0].layouts["experts"] == Shard(1)
    node = graphs[0].placeholder(Parameter("experts"))
    assert node is not None
    assert node.meta["val"].shape == (2, 2, 6)
    assert_parity(it, graphs, 1e-6 if dtype else EXACT)


def test_a_dim_that_divides_more_evenly_is_sharded() -> None:
    shapes = {(8, 64): 16, (8, 64, 32): 5, (50257, 768): 16, (7,): 16, (10, 7): 4}
    dims = [shard_dim(shape, ranks) for shape, ranks in shapes.items()]
    assert dims == [1, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("model", "stage"),
    [(Normalised, 1), (Normalised, 2), (Normalised, 3), (NormalisedTwice, 3)],
)
def test_gradients_are_the_same(model: type[Normalised], stage: int) -> None:
    it = World(model().double(), two_layers(rows=7).batch, 3)
    graphs = it.lower(
        lambda rank: (
            AssignBatchAxis(AXIS),
            ShardParameters(AXIS, rank, stages(stage, stage)),
            SynchronizeGradients(AXIS, rank),
        )
    )
    assert_parity(it, graphs)
    assert ("blocks.1.weight" in graphs[0].layouts) == (stage == 3)


def test_stage_3_keeps_nothing_whole_for_the_backward() -> None:
    it = World(Normalised().double(), two_layers(rows=4).batch, 2)
    passes = [AssignBatchAxis(AXIS), ShardParameters(AXIS, 0, stages(3, 0))]
    graph = run_passes(it.graph(0), passes)
    whole = {node for node in graph.graph.nodes if "gathered" in node.meta}
    for node in graph.calls():
        if node.all_input_nodes and whole.issuperset(node.all_input_nodes):
            whole.add(node)  # computed from parameters alone
    assert len(whole) > 5
    for node in whole:
        assert {user.meta["phase"] for user in node.users} <= {node.meta["phase"]}, node


def test_stage_3_keeps_the_last_block_which_the_backward_needs_first() -> None:
    _, after = sharded(0, 3, 3)
    gathered = [node.meta for node in after.graph.nodes if "gathered" in node.meta]
    assert [(meta["gathered"], meta["phase"]) for meta in gathered] == [
        ("blocks.0.weight", "forward"),
        ("blocks.1.weight", "forward"),
    ]


def test_says_why_it_declined() -> None:
    result = ShardParameters(AXIS, 0, stages(0, 0))(two_layers().graph(0))
    assert result.reason == "every block is stage 0: parameters stay whole"
    assert result.reason
