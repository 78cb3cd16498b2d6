"""Layouts that practitioners would choose, and that a search tries and names."""

from typing import Any

import torch
from torch import nn

import autopar
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
        sizes = {"pp": strategy.pp_size, **strategy.axes}
        sizes = {axis: size for axis, size in sizes.items() if size > 1}
        found.setdefault(each.name, []).append((sizes, strategy.zero, strategy.micro_batches))
        assert not strategy.search
    return found


def test_stages_follow_until_states_fit() -> None:
    # 96 blocks of 4096 have 19 billion parameters: 155 GB with gradients, 39 of 8 ranks' memory
    found = layouts(problem(64, Strategy(search=ALL)))
    assert found == {
        "FSDP with tp in a node": [({"tp": 8}, 3, 1), ({"tp": 8}, 3, 8)],
        "Megatron's": [({"tp": 8}, 1, 1), ({"tp": 8}, 1, 8)],
    }
    small = problem(64, Strategy(search=ALL), memory=16 * 2**30)
    assert layouts(small)["Megatron's"] == [({"pp": 4, "tp": 8}, 1, 32)]


def test_what_the_user_fixes_stays() -> None:
    assert layouts(problem(64, Strategy(tp=2, search=("pp",)))) == {}
    assert layouts(problem(64, Strategy(search=("pp", "cp")))) == {}  # tp may not be searched
    fixed = Strategy(search=ALL, zero=2, micro_batches=4)
    assert {(zero, count) for each in layouts(problem(64, fixed)).values()
            for _, zero, count in each} == {(2, 4)}  # fmt: skip


def test_long_rows_and_experts_have_layouts_of_their_own() -> None:
    long = layouts(problem(64, Strategy(search=ALL), row_length=LONG_ROW))
    assert long["FSDP with cp in a node"] == [({"cp": 8}, 3, 1), ({"cp": 8}, 3, 8)]

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Experts(512, 4, 64) for _ in range(4))

    with torch.device("meta"):
        experts = layouts(problem(64, Strategy(search=ALL), model=Mixture()))
    assert experts["FSDP with experts in a node"] == [({"ep": 4}, 3, 1), ({"ep": 4}, 3, 4)]


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
    assert set(usual) >= {"FSDP with tp in a node", "Megatron's"}
    for each in usual.values():
        assert bool(each.plan) != bool(each.why)
        assert not each.plan or each.step_s >= 0.99 * plan.prediction.step_s
    assert "FSDP with tp in a node" in " ".join(brief(plan).split())
    assert not [note for note in plan.notes if "add up" in note]
    assert "usual layouts: DDP" in str(plan)
    assert autopar.Plan.from_dict(plan.to_dict()) == plan
