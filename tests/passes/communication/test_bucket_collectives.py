import pytest
from expecttest import assert_expected_inline
from torch import Tensor

from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.buckets import Buckets
from autopar.passes.communication.bucket_collectives import (
    BucketCollectives,
    gathers,
    propose_buckets,
    reductions,
)
from autopar.passes.core.collective_ops import start_all_reduce, starts
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.assign_batch_axis import AssignBatchAxis
from autopar.passes.data_parallel.shard_parameters import ShardParameters
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from tests.harness.training import close
from tests.passes.golden import TwoLayers, text, two_layers
from tests.passes.parity import AXIS, World, assert_parity

W0, W1, B0, B1 = "blocks.0.weight", "blocks.1.weight", "blocks.0.bias", "blocks.1.bias"


class TwoLosses(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x.abs().mean()


def before(rank: int, stages: tuple[int, int] = (2, 2)) -> tuple[Pass, ...]:
    of_blocks = (("", 0), ("blocks.0", stages[0]), ("blocks.1", stages[1]))
    return (
        AssignBatchAxis(AXIS),
        ShardParameters(AXIS, rank, of_blocks),
        SynchronizeGradients(AXIS, rank),
    )


def collectives(graph: TrainingGraph) -> str:
    return text(graph, lambda node: node in set(starts(graph)))


def bucketed(it: World, buckets: Buckets, stages: tuple[int, int] = (2, 2)) -> TrainingGraph:
    return run_passes(it.graph(0), [*before(0, stages), BucketCollectives(buckets)])


def test_members_of_a_bucket_travel_together() -> None:
    """Gathers start where the first did, reductions where the last did."""
    buckets = Buckets(gather=((W0, W1),), reduce=((W1, W0),))
    after = bucketed(two_layers(), buckets)
    assert_expected_inline(
        collectives(after),
        """\
start_all_gather_2: [3,4] [2,3] R = start_all_gather([blocks.0.weight, blocks.1.weight], [3, 2], dp)
start_all_reduce: [] R = start_all_reduce([div_scalar], dp)
start_reduce_scatter_2: [1,3] [2,4] S(0) = start_reduce_scatter([t_5, t_8], [1, 2], dp)""",
    )
    order = [n.name for n in after.calls()]
    assert order.index("start_all_gather_2") < order.index("t") < order.index("mm")
    assert order.index("start_reduce_scatter_2") > order.index("t_8")


def test_names_that_the_graph_lacks_are_left_out() -> None:
    with_all = Buckets(gather=(("gone", W0), (W1, "away")), reduce=((W1, "gone", W0),))
    without = Buckets(reduce=((W1, W0),))
    texts = {str(bucketed(two_layers(), b)).partition("bucket")[0] for b in (with_all, without)}
    assert len(texts) == 1


def test_unlike_collectives_of_a_bucket_stay_apart() -> None:
    """One is reduced whole, one scattered."""
    after = bucketed(two_layers(), Buckets(reduce=((W1, W0),)), stages=(2, 0))
    assert [len(start.args[0]) for _, start in reductions(after)] == [1, 1]  # type: ignore[arg-type]


def test_statistics_that_can_wait_join_the_next_one() -> None:
    """Two losses are one message."""
    after = bucketed(World(TwoLosses().double(), two_layers().batch, 2), Buckets())
    small = [s for s in starts(after) if s.target is start_all_reduce and "gradient" not in s.meta]
    assert [len(start.args[0]) for start in small] == [2]  # type: ignore[arg-type]


def test_proposed_buckets_hold_no_more_than_their_size() -> None:
    it = two_layers(bias=True)
    graph = run_passes(it.graph(0), before(0))
    assert [name for name, _ in gathers(graph, "forward")] == [W0, B0, W1, B1]
    limit = 96 + 24  # the bytes of the first layer
    assert propose_buckets(graph, limit, 1).gather == ((W0, B0), (W1, B1))
    assert propose_buckets(graph, limit - 1, 1).gather == ((W0,), (B0, W1, B1))
    assert propose_buckets(graph, 1, 1 << 20).reduce == ((B1, W1, B0, W0),)
    assert propose_buckets(graph, 1, 1).reduce == ((B1,), (W1,), (B0,), (W0,))


def test_gradients_do_not_change() -> None:
    it = two_layers(ranks=3, rows=7, bias=True)
    buckets = Buckets(gather=((B0, W0, W1, B1),), regather=((W0, B0),), reduce=((W1, B1, W0, B0),))
    assert_parity(it, it.lower(lambda rank: (*before(rank, (3, 3)), BucketCollectives(buckets))))


@pytest.mark.parametrize("shard", [(0, 0), (3, 3)], ids=str)
def test_gradients_that_travel_in_bf16_are_cast_after_their_bucket(shard: tuple[int, int]) -> None:
    it = two_layers(bias=True)
    buckets = Buckets(gather=((B0, W0, W1, B1),), regather=((W0, B0),), reduce=((W1, B1, W0, B0),))

    def passes(rank: int, *more: Pass) -> tuple[Pass, ...]:
        narrow = SynchronizeGradients(AXIS, rank, dtype="bfloat16")
        return *before(rank, shard)[:-1], narrow, *more

    alone = it.run(it.lower(passes))
    for have, want in zip(
        it.run(it.lower(lambda rank: passes(rank, BucketCollectives(buckets)))), alone, strict=True
    ):
        close(
            {str(role): value for role, value in have.items()},
            {str(r): v for r, v in want.items()},
            0.0,
        )


def test_says_why_it_declined() -> None:
    graph = run_passes(two_layers().graph(0), [ShardParameters(AXIS, 0, before(0)[1].stages)])  # type: ignore
    result = BucketCollectives(Buckets())(graph)
    assert result.reason == "no two collectives can travel together"
