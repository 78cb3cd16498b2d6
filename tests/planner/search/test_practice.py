"""Layouts that practitioners would choose, and that a search tries and names."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.core.plan.search_outcome import DDP, FSDP, MEGATRONS, RECOMPUTED
from autopar.core.plan.strategy import Strategy
from autopar.planner.problem import PlanningProblem
from autopar.planner.search.practice import LONG_ROW, practice
from autopar.report.brief import brief
from tests.planner.blocks import Experts, GPTBlock, Stack
from tests.planner.problems import problem_of

ALL = ("pp", "tp", "cp", "ep")
Sizes = dict[str, int]


def problem(world: int, strategy: Strategy, **more: Any) -> PlanningProblem:
    model = more.pop("model", None)
    if model is None:
        with torch.device("meta"):
            model = Stack(lambda: GPTBlock(4096, 32), 96)
    cluster = autopar.Cluster.named("dgx-h100", world // 8)
    fixed = {"world_size": world, "cluster": cluster, "comm_backend": "nccl", "rows": world}
    return problem_of(model, strategy, **(fixed | more))


def layouts(own: PlanningProblem) -> dict[str, list[tuple[Sizes, Any, Any]]]:
    found: dict[str, list[tuple[Sizes, Any, Any]]] = {}
    for each in practice(own, 8, own.cap_on(own.cluster)):
        strategy = each.strategy
        sizes = {"pp": strategy.pp_size, **strategy.axes, "dp_shard": strategy.dp_shard or 1}
        sizes = {axis: size for axis, size in sizes.items() if size > 1}
        found.setdefault(each.name, []).append((sizes, strategy.zero, strategy.micro_batches))
        assert not strategy.search
    return found


def test_stages_follow_until_states_fit() -> None:
    # 96 blocks of 4096 have 19 billion parameters: 155 GB with gradients, 39 of 8 ranks' memory
    found = layouts(problem(64, Strategy(search=ALL)))
    assert found == {
        "torchtitan's FSDP and tp": [({"tp": 8}, 3, None), ({"tp": 8}, 3, 8)],
        "Megatron's": [({"tp": 8}, 1, None), ({"tp": 8}, 1, 8)],
    }
    small = layouts(problem(64, Strategy(search=ALL), memory=16 * 2**30))
    assert small["Megatron's"] == [({"pp": 4, "tp": 8}, 1, 32)]
    assert small["torchtitan's FSDP, tp and pp"] == [({"pp": 2, "tp": 8}, 2, 16)]


def test_shards_lie_within_a_node_or_on_as_few_as_states_fit_on() -> None:
    found = layouts(problem(64, Strategy(search=(*ALL, "dp_shard"))))
    assert found["HSDP"] == [({"dp_shard": 8}, 3, None)]
    # 77 GB of parameters, gradients and states over 8 x 2 ranks
    assert found["torchtitan's HSDP and tp"][0] == ({"tp": 8, "dp_shard": 2}, 3, None)
    one = layouts(problem(8, Strategy(search=(*ALL, "dp_shard"))))
    assert not [name for name in one if "HSDP" in name]
    assert "HSDP" not in layouts(problem(64, Strategy(search=("dp_shard",), zero=0)))


def test_micro_batches_of_many_rows_are_few() -> None:
    many = layouts(problem(64, Strategy(search=ALL), rows=2**16))
    assert many["Megatron's"] == [({"tp": 8}, 1, None), ({"tp": 8}, 1, 256)]


def test_what_the_user_fixes_stays() -> None:
    assert layouts(problem(64, Strategy(tp=2, search=("pp",)))) == {}
    assert layouts(problem(64, Strategy(search=("pp", "cp")))) == {}  # tp may not be searched
    fixed = Strategy(search=ALL, zero=2, micro_batches=4)
    assert {(zero, count) for each in layouts(problem(64, fixed)).values()
            for _, zero, count in each} == {(2, 4)}  # fmt: skip


def test_long_rows_and_experts_have_layouts_of_their_own() -> None:
    long = layouts(problem(64, Strategy(search=ALL), row_length=LONG_ROW))
    assert long["torchtitan's FSDP and cp"] == [({"cp": 8}, 3, None), ({"cp": 8}, 3, 8)]

    class Mixture(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Experts(512, count, 64) for _ in range(4))

    with torch.device("meta"):
        few = layouts(problem(64, Strategy(search=ALL), model=Mixture(4)))
        many = problem(64, Strategy(search=ALL), model=Mixture(32))
    assert few["FSDP with experts in a node"] == [({"ep": 4}, 3, None), ({"ep": 4}, 3, 4)]
    assert few["DeepSeek's"] == [({"ep": 4}, 1, None), ({"ep": 4}, 1, 4)]
    assert layouts(many)["DeepSeek's"] == [({"ep": 32}, 1, None), ({"ep": 32}, 1, 32)]
    assert layouts(many)["Megatron's with experts"][0] == ({"ep": 8}, 1, None)
    small = layouts(replace(many, memory=2 * 2**20))
    assert small["DeepSeek's"] == [({"ep": 32, "pp": 2}, 1, 16)]


def test_a_plan_names_them_and_is_never_slower() -> None:
    with torch.device("meta"):
        model, x = Stack(lambda: GPTBlock(512, 8), 8), torch.empty(32, 256, 512)
    plan = autopar.plan(
        model, 16, example_inputs=(x,), cluster=autopar.Cluster.named("dgx-h100", 2),
        strategy="fastest", time_limit_s=60,
    )  # fmt: skip
    assert plan.search is not None
    assert plan.prediction is not None
    usual = {each.name: each for each in plan.search.practice}
    assert [*usual][:4] == [DDP, FSDP, RECOMPUTED, MEGATRONS]
    assert set(usual) >= {"torchtitan's FSDP and tp", "HSDP"}
    for each in usual.values():
        assert bool(each.plan) != bool(each.why)
        assert not each.plan or each.step_s >= 0.99 * plan.prediction.step_s
    assert "torchtitan's FSDP and tp" in " ".join(brief(plan).split())
    assert not [note for note in plan.notes if "add up" in note]
    assert "other usual layouts: " in str(plan)
    assert autopar.Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize(
    ("strategy", "limit_s"),
    [("zero3", None), ("zero3", 60), (Strategy(search=("tp",), recompute="none"), None)],
    ids=["fixed", "fixed in time", "searched"],
)
def test_four_usual_layouts_stand_beside_every_plan(
    strategy: str | Strategy, limit_s: float | None
) -> None:
    with torch.device("meta"):
        model, x = Stack(lambda: GPTBlock(256, 8), 6), torch.empty(16, 128, 256)
    plan = autopar.plan(
        model, 8, example_inputs=(x,), cluster=autopar.Cluster.named("dgx-h100"),
        strategy=strategy, time_limit_s=limit_s,
    )  # fmt: skip
    assert plan.search is not None
    usual = plan.search.practice
    assert [each.name for each in usual][:4] == [DDP, FSDP, RECOMPUTED, MEGATRONS]
    assert usual[3].step_s > 0
    assert usual[3].needed_bytes > 0
    assert usual[3].plan.startswith("tp8, zero1")
