"""Outlines of meshes: from few blocks as from all, and near to what is then simulated."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.batch_slices import CaptureCache, capture_of_rank
from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.errors import BatchError
from autopar.planner.problem import PlanningProblem
from autopar.planner.search.estimate_captures import MeshEstimator, kinds_of, with_num_layers
from autopar.planner.search.mesh_estimate import MeshEstimate
from examples.plan_llama import Llama, Size
from tests.planner.problems import problem_of

ROWS, RANKS = 32, 16
CLUSTER = Cluster.named("dgx-h100", 2)


@functools.cache
def llama() -> nn.Module:
    with torch.device("meta"):
        return Llama(Size(512, 1024, 8, 8, 8, 4096)).to(torch.bfloat16)


def inputs(rows: int = ROWS) -> tuple[torch.Tensor, ...]:
    return (torch.zeros(rows, 512, dtype=torch.long, device="meta"),) * 2


def captured(slices: int, cache: CaptureCache, rows: int = ROWS) -> TrainingGraph:
    return capture_of_rank(llama(), inputs(rows), 0, slices, cache=cache, in_time=slices > 1)


def asked(strategy: Strategy) -> PlanningProblem:
    problem = problem_of(llama(), strategy, world_size=RANKS, cluster=CLUSTER)
    return replace(problem, comm_backend="nccl", device=torch.device("meta"))


MESHES = [
    Strategy(micro_batches=1),
    Strategy(tp=2, micro_batches=1),
    Strategy(tp=8, micro_batches=1),
    Strategy(pp=2, micro_batches=4),
    Strategy(pp=4, tp=2, micro_batches=8),
]


@pytest.fixture(scope="module")
def outlines() -> list[list[MeshEstimate]]:
    """Of a model with few of its blocks, and of all of it."""
    estimators = [MeshEstimator(asked(Strategy()), captured, model) for model in (llama(), None)]
    return [[sketch(asked(strategy)) for strategy in MESHES] for sketch in estimators]


@pytest.mark.slow
def test_a_few_blocks_tell_of_all(outlines: list[list[MeshEstimate]]) -> None:
    """But for placements: other ones are as good, to the solver's tolerance, that convert apart."""
    for few, whole in zip(*outlines, strict=True):
        assert few.step_s == pytest.approx(whole.step_s, rel=1e-2)
        assert few.least_s == pytest.approx(whole.least_s, rel=1e-2)
        assert few.least_bytes == pytest.approx(whole.least_bytes, rel=1e-2)


@pytest.mark.slow
def test_they_are_near_to_what_is_simulated(outlines: list[list[MeshEstimate]]) -> None:
    for strategy, outline in zip(MESHES, outlines[0], strict=True):
        pipelined = strategy.pp_size > 1
        fixed = replace(
            strategy,
            zero=0,
            recompute="none",
            gather_bytes=2**25,
            reduce_bytes=2**25,
            prefetch=1,
            micro_batches=strategy.micro_batches if pipelined else None,
            schedule="1f1b" if pipelined else None,
        )
        cost = autopar.plan(
            llama(), RANKS, example_inputs=inputs(), strategy=fixed, cluster=CLUSTER
        ).prediction
        assert cost is not None
        assert outline.least_s <= cost.step_s
        assert outline.step_s == pytest.approx(cost.step_s, rel=0.35)


def test_rows_that_cannot_be_cut() -> None:
    sketch = MeshEstimator(asked(Strategy()), captured, llama())
    with pytest.raises(BatchError, match="32 rows cannot be cut into 64 equal slices"):
        sketch(asked(Strategy(pp=2, micro_batches=8)))


def test_blocks_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), *(nn.Linear(4, 4) for _ in range(5)))
    (kind,) = kinds_of(model, [str(place) for place in range(6)])
    with with_num_layers(model, [kind], [2]):
        assert len(model) == 2
    assert [name for name, _ in model.named_children()] == [*"012345"]


@pytest.mark.slow
def test_micro_batches_of_several_rows_where_there_is_a_row_for_each_rank() -> None:
    """Four stages compute a quarter of what they do of four times the rows, in as large pieces.

    They wait as long as for one more micro-batch until all have one, and after the last.
    """
    strategy, found = Strategy(pp=4), []
    for rows, count in ((RANKS, 1), (4 * RANKS, 4)):
        sketch = MeshEstimator(asked(Strategy()), functools.partial(captured, rows=rows), llama())
        found.append(sketch(asked(replace(strategy, micro_batches=count))).least_s)
    assert (4 + 1) / (1 + 1) * found[0] == pytest.approx(found[1], rel=0.2)


@pytest.mark.slow
def test_ranks_of_tp_that_compute_for_other_rows_sum_all_gradients() -> None:
    """With 16 rows for eight ranks of tp they do; of one row they divide operators."""
    for rows, divides in ((ROWS, False), (2, True)):
        capture = functools.partial(captured, rows=rows)
        sketch = MeshEstimator(asked(Strategy()), capture, llama())
        assert sketch(asked(Strategy(tp=8, micro_batches=1))).divides == divides
