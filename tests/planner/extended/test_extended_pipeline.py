"""Pipelines by arithmetic from three stages, beside pipelines of the whole model."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.batch_slices import CaptureCache, capture_of_rank
from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.strategy import Strategy
from autopar.planner.extended.default_pipelines import least_idle_first
from autopar.planner.extended.extended_search import can_extend, plan_extended
from autopar.planner.extended.reduced_models import ReducedModels
from autopar.planner.extended.stage_blocks import StageBlocks, UnevenStagesError
from autopar.planner.machine import known_machine
from autopar.planner.problem import PlanningProblem, SearchContext
from autopar.planner.search.fixed_mesh import plan_fixed_mesh
from tests.planner.blocks import GPTBlock
from tests.planner.problems import problem_of

DEPTH = 14


class Gpt(nn.Module):
    """Blocks between an embedding and a head, which may be one matrix."""

    def __init__(self, width: int, depth: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, width)
        self.blocks = nn.ModuleList(GPTBlock(width, 8) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4096, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())


@cache
def gpt(tied: bool) -> tuple[Gpt, torch.Tensor]:
    with torch.device("meta"):
        return Gpt(1024, DEPTH, tied=tied), torch.empty(32, 512, dtype=torch.long)


KEPT: dict[bool, CaptureCache] = {True: {}, False: {}}


def problem(tied: bool, **strategy: Any) -> PlanningProblem:
    cluster = autopar.Cluster.named("dgx-h100", 2)
    fixed = Strategy(**({"prefetch": 1, "recompute": "none"} | strategy))
    more = {"world_size": 16, "cluster": cluster, "comm_backend": "nccl"}
    return problem_of(gpt(tied)[0], fixed, **more)


def models(own: PlanningProblem, tied: bool) -> ReducedModels:
    def captured(ranks: int, count: int, cache: CaptureCache) -> TrainingGraph:
        model, x = gpt(tied)
        return capture_of_rank(model, (x,), 0, ranks, micro_batches=count, cache=cache)

    return ReducedModels(gpt(tied)[0], own.blocks, captured)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "strategy",
    [
        {"pp": 4, "schedule": "1f1b", "zero": 1},
        {"pp": 4, "schedule": "interleaved", "zero": 0, "recompute": "full"},
        {"pp": 2, "schedule": "interleaved", "stages_per_rank": 4, "zero": 1},
        {"pp": 2, "schedule": "zbv", "zero": 2},
        {"pp": 4, "schedule": "zero_bubble", "zero": 3, "tp": 2},
        {"pp": 8, "schedule": "1f1b", "zero": 1, "recompute": "selective"},
    ],
    ids=str,
)
def test_stages_grow_with_their_blocks(strategy: dict[str, Any], tied: bool) -> None:
    own = problem(tied, micro_batches=4, **strategy)
    few = plan_extended(own, models(own, tied), known_machine(own, 1), SearchContext()).plan
    assert few.pipeline is not None
    cuts = [next(n for n, at in few.pipeline.uses if at[0] == stage and n.startswith("blocks"))
            for stage in range(1, few.pipeline.stages)]  # fmt: skip
    pinned = replace(own, strategy=replace(own.strategy, split_points=tuple(cuts)))
    model, x = gpt(tied)
    graph = capture_of_rank(model, (x,), 0, own.dp_size, micro_batches=4, cache=KEPT[tied])
    whole = plan_fixed_mesh(pinned, {4: graph}, known_machine(own, 1))
    a, b = few.prediction, whole.prediction
    assert a is not None
    assert b is not None
    assert whole.pipeline is not None
    assert dict(few.pipeline.uses) == dict(whole.pipeline.uses)
    assert few.pipeline.rows == whole.pipeline.rows
    assert a.step_s == pytest.approx(b.step_s, rel=0.03)
    assert a.compute_s == pytest.approx(b.compute_s, rel=0.02)
    assert a.exposed_s == pytest.approx(b.exposed_s, abs=0.03 * b.step_s)
    assert a.update_s == pytest.approx(b.update_s, rel=0.05)
    assert a.peak_bytes == pytest.approx(b.peak_bytes, rel=0.04)
    assert a.needed_bytes == pytest.approx(b.needed_bytes, rel=0.1)
    assert a.bubble == pytest.approx(b.bubble, abs=0.03)
    assert a.work == pytest.approx(b.work)
    assert dict(few.sent_bytes) == pytest.approx(dict(whole.sent_bytes), rel=0.02)
    assert dict(few.placements) == dict(whole.placements)


def test_two_stages_in_a_node_need_no_link_between_nodes() -> None:
    """Three stages are lowered, and the third would lie on another node."""
    fixed = Strategy(pp=2, tp=2, micro_batches=4, schedule="1f1b", zero=1, recompute="none")
    one = {"world_size": 8, "cluster": autopar.Cluster.named("dgx-h100", 1)}
    own = replace(problem(False), strategy=fixed, **one)
    found = plan_extended(own, models(own, False), known_machine(own, 1), SearchContext())
    assert found.plan.pipeline is not None
    assert found.step_s > 0


def test_blocks_are_balanced_over_ranks() -> None:
    names = [str(index) for index in range(10)]
    plain = StageBlocks.balanced(names, (0, 1, 2, 3), [2.0, 0.0, 0.0, 2.0], 1.0)
    assert [name for stage in plain.stages for name in stage] == names
    busy = [2.0 + len(plain.stages[0]), *map(len, plain.stages[1:3]), 2.0 + len(plain.stages[3])]
    assert max(busy) == 4.0
    folded = StageBlocks.balanced(names, (0, 1, 1, 0), [1.0, 0.0, 0.0, 3.0], 1.0)
    sizes = [*map(len, folded.stages)]
    assert sizes[0] + sizes[3] == 3
    assert sizes[1] + sizes[2] == 7


def test_only_blocks_of_one_kind_in_a_row_extend() -> None:
    own = problem(False, pp=4)
    several = models(own, False)
    assert can_extend(own, several)
    assert not can_extend(problem(False, pp=8, schedule="interleaved"), several)  # 16 stages
    assert not can_extend(
        problem(False, pp=2, split_points=("blocks.3",)), several
    )  # cuts that the user chose
    assert issubclass(UnevenStagesError, autopar.StrategyError)


def test_schedules_that_idle_least_come_first_and_interleaved_ones_go_deeper() -> None:
    few = least_idle_first(Strategy(pp=4), blocks=8, micro_batches=4)
    assert few[:2] == [("1f1b", 1), ("interleaved", 2)]
    many = least_idle_first(Strategy(pp=4), blocks=32, micro_batches=4)
    assert many[:4] == [("1f1b", 1), ("interleaved", 8), ("interleaved", 4), ("interleaved", 2)]
    assert many[-1] == ("gpipe", 1)
    fixed = Strategy(pp=4, schedule="interleaved", stages_per_rank=2)
    assert least_idle_first(fixed, blocks=32, micro_batches=4) == [("interleaved", 2)]
