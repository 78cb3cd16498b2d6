"""Plans by arithmetic from a few blocks, beside plans of the whole model."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.batch_slices import CaptureCache, capture_of_rank
from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.layout import Layout
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import Strategy
from autopar.passes.communication.bucket_collectives import BucketCollectives, propose_buckets
from autopar.passes.core.collective_ops import start_all_gather, starts
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline import build_pass_pipeline
from autopar.planner.evaluate.candidate import default_config
from autopar.planner.extended.extended_search import extended_evaluator, plan_extended
from autopar.planner.extended.reduced_models import ReducedModels, only_few_blocks
from autopar.planner.machine import known_machine
from autopar.planner.problem import PlanningProblem, SearchContext
from autopar.planner.search.estimate_captures import MeshEstimator
from autopar.planner.search.fixed_mesh import plan_fixed_mesh
from tests.planner.blocks import GPTBlock, Stack, T5Block
from tests.planner.problems import problem_of

DEPTH = 7


@cache
def gpt() -> tuple[Stack, torch.Tensor]:
    with torch.device("meta"):
        return Stack(lambda: GPTBlock(1024, 8), DEPTH), torch.empty(32, 512, 1024)


CACHE: CaptureCache = {}
REDUCED: dict[tuple[int, ...], CaptureCache] = {}


def captured(ranks: int, count: int, cache: CaptureCache) -> TrainingGraph:
    model, x = gpt()
    return capture_of_rank(model, (x,), 0, ranks, micro_batches=count, cache=cache)


def problem(**strategy: Any) -> PlanningProblem:
    cluster = autopar.Cluster.named("dgx-h100")
    fixed = Strategy(**({"prefetch": 1} | strategy))
    more = {"world_size": 8, "cluster": cluster, "comm_backend": "nccl"}
    return problem_of(gpt()[0], fixed, **more)


def extended(own: PlanningProblem) -> Plan:
    models = ReducedModels(gpt()[0], own.blocks, captured)
    models.captures |= REDUCED
    found = plan_extended(own, models, known_machine(own, 1), SearchContext()).plan
    REDUCED.update(models.captures)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        {"zero": 0, "recompute": "none"},
        {"zero": 3, "recompute": "full"},
        {"zero": 1, "recompute": "none", "micro_batches": 2},
        {"zero": 0, "recompute": "none", "tp": 2},
    ],
    ids=str,
)
def test_figures_grow_with_the_blocks(strategy: dict[str, Any]) -> None:
    own = problem(**strategy)
    count = own.strategy.micro_batches or 1
    few = extended(own)
    whole = plan_fixed_mesh(
        own, {count: captured(own.dp_size, count, CACHE)}, known_machine(own, 1)
    )
    a, b = few.prediction, whole.prediction
    assert a is not None
    assert b is not None
    assert a.step_s == pytest.approx(b.step_s, rel=0.03)
    assert a.compute_s == pytest.approx(b.compute_s, rel=0.01)
    assert a.peak_bytes == pytest.approx(b.peak_bytes, rel=0.01)
    # blocks of the allocator split differently in few blocks
    assert a.reserved_bytes - a.peak_bytes == pytest.approx(
        b.reserved_bytes - b.peak_bytes, abs=0.1 * b.peak_bytes
    )
    assert a.work == pytest.approx(b.work)
    assert dict(few.sent_bytes) == pytest.approx(dict(whole.sent_bytes), rel=0.01)
    assert few.placements == whole.placements
    assert [p.layouts for p in few.partitions] == [p.layouts for p in whole.partitions]


def test_a_wait_that_the_third_block_ends_is_not_saved_again_by_every_other() -> None:
    """Buckets of three blocks; the step was 0.5 ms shorter than its parts."""
    own = problem(zero=0, recompute="none", reduce_bytes=96 * 2**20)
    few = extended(own)
    p = few.prediction
    assert p is not None
    assert p.step_s == pytest.approx(p.compute_s + p.exposed_s + p.update_s)
    models = ReducedModels(gpt()[0], own.blocks, captured)
    models.captures |= REDUCED
    evaluator = extended_evaluator(own, models, known_machine(own, 1), SearchContext())
    config = default_config(own.strategy, own.blocks, 0)
    assert own.cluster is not None
    (step_s,) = evaluator.seconds(config, (own.cluster,))
    assert step_s == pytest.approx(p.step_s, rel=0.005)
    assert not [note for note in few.notes if "does not add up" in note]


class TwoStacks(nn.Module):
    """Blocks of two kinds, one kind after the other."""

    def __init__(self, *depths: int) -> None:
        super().__init__()
        first, second = depths
        self.first = Stack(lambda: GPTBlock(256, 4), first).blocks
        self.second = Stack(lambda: T5Block(256, 4), second).blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.first, *self.second):
            x = block(x)
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("depths", [(5, 5), (4, 6)], ids=str)
def test_kinds_of_equal_length_grow_together(depths: tuple[int, int]) -> None:
    with torch.device("meta"):
        model, x = TwoStacks(*depths), torch.empty(16, 128, 256)

    def capture(ranks: int, count: int, cache: CaptureCache) -> TrainingGraph:
        return capture_of_rank(model, (x,), 0, ranks, micro_batches=count, cache=cache)

    fixed = Strategy(prefetch=1, zero=0, recompute="none")
    more = {"world_size": 8, "cluster": autopar.Cluster.named("dgx-h100"), "comm_backend": "nccl"}
    own = problem_of(model, fixed, **more)
    models, machine = ReducedModels(model, own.blocks, capture), known_machine(own, 1)
    few = plan_extended(own, models, machine, SearchContext()).prediction
    whole = plan_fixed_mesh(own, {1: capture(8, 1, {})}, machine).prediction
    assert few is not None
    assert whole is not None
    assert len(models.samples) == 1 + len(set(depths))
    assert few.compute_s == pytest.approx(whole.compute_s, rel=0.01)
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.05)  # of another moment
    assert few.work == pytest.approx(whole.work)


@pytest.mark.slow
def test_a_plan_that_does_not_fit_whole_recomputes_more() -> None:
    graphs, fixed = {1: captured(8, 1, CACHE)}, problem(zero=1, recompute="none")
    machine = known_machine(fixed, 1)
    most = plan_fixed_mesh(fixed, graphs, machine).prediction
    assert most is not None
    own = replace(problem(), memory=int(0.8 * most.needed_bytes))
    config = default_config(own.strategy, own.blocks, 1)
    found = plan_fixed_mesh(own, graphs, machine, first=config)
    assert {stage for _, stage in found.zero_stages} == {1}
    assert not [each for each in found.runners_up if "zero3" in each.name]  # no other was tried
    assert {level for _, level in found.recompute} != {"none"}
    assert found.prediction is not None
    assert found.prediction.needed_bytes <= (own.memory or 0)


@pytest.mark.slow
def test_recomputation_is_never_lowered_on_the_way() -> None:
    graphs, own = {1: captured(8, 1, CACHE)}, problem(zero=1)
    machine, blocks = known_machine(own, 1), [*filter(None, own.blocks)]
    config = default_config(own.strategy, own.blocks, 1)
    levels = dict.fromkeys(own.blocks, "selective") | dict.fromkeys(blocks[:1], "full")
    config = replace(config, recompute=tuple(levels.items()))  # type: ignore[arg-type]
    pinned = [problem(zero=1, recompute=level) for level in ("selective", "full")]
    costs = [plan_fixed_mesh(each, graphs, machine).prediction for each in pinned]
    needed = [cost.needed_bytes for cost in costs if cost is not None]
    own = replace(own, memory=sum(needed) // 2)
    tried: list[Plan] = []
    context = SearchContext(on_candidate=tried.append)
    found = plan_fixed_mesh(own, graphs, machine, context, config)
    assert all(dict(plan.recompute)[blocks[0]] == "full" for plan in tried)
    assert 1 < sum(level == "full" for _, level in found.recompute) <= len(own.blocks)
    assert found.prediction is not None
    assert found.prediction.needed_bytes <= (own.memory or 0)


def test_plans_in_a_row_share_captures() -> None:
    made: list[int] = []

    def counted(ranks: int, count: int, cache: CaptureCache) -> TrainingGraph:
        made.append(ranks)
        return captured(ranks, count, cache)

    def models() -> ReducedModels:
        return ReducedModels(gpt()[0], problem().blocks, counted)

    with only_few_blocks():
        models().captures |= REDUCED
        for ranks in (4, 8, 8):
            own = models()
            found = [own.get(layers, ranks, 1) for layers in own.samples]
            assert len(found[0].blocks) < len(found[1].blocks)
            assert own.alone
        REDUCED.update(own.captures)
        assert made == [4, 4, 8, 8]
        assert own.whole_nodes() > len(found[1].graph.graph.nodes)
        assert len([*own.captures[own.fewest]]) == 1  # of the whole batch
    assert not models().alone


def test_ranks_fill_the_buckets_themselves() -> None:
    own = problem(zero=3, recompute="none", gather_bytes=2**26, reduce_bytes=2**26)
    few = extended(own)
    assert few.bucket_bytes == (2**26, 2**26)
    assert Plan.from_dict(few.to_dict()) == few
    passes = build_pass_pipeline(few, 0, "nccl")
    at = next(i for i, item in enumerate(passes) if isinstance(item, BucketCollectives))
    graph = run_passes(replace(captured(8, 1, CACHE), axes=Layout(few).axes), passes[:at])
    merged = run_passes(graph, [passes[at]])
    proposed = propose_buckets(graph, 2**26, 2**26)
    sent = [start for start in starts(merged) if start.target is start_all_gather]
    assert len(sent) == len(proposed.gather) + len(proposed.regather)
    assert len(proposed.gather) > 1


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 4}, {"micro_batches": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_a_share_of_the_whole_batch_bounds_every_mesh(mesh: dict[str, Any]) -> None:
    def capture(slices: int, cache: CaptureCache) -> TrainingGraph:
        return capture_of_rank(gpt()[0], (gpt()[1],), 0, slices, cache=cache, in_time=slices > 1)

    estimator = MeshEstimator(problem(), capture, gpt()[0], captures=REDUCED)
    fixed = problem(**({"micro_batches": 1} | mesh))
    assert 0.0 < estimator.floor_s() <= estimator(fixed).least_s * 1.001
