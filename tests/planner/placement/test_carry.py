"""Strategies of one graph beside those solved for its deeper and longer relatives."""

from typing import Any

import pytest
import torch

import autopar
from autopar.capture.batch_slices import capture_of_rank
from autopar.core.ir.graph import TrainingGraph
from autopar.planner.machine import known_machine
from autopar.planner.placement.carry import SolvedAxes
from autopar.planner.problem import PlanningProblem
from autopar.planner.search.build_evaluator import build_evaluator, solve_axis
from tests.planner.blocks import GPTBlock, Stack
from tests.planner.problems import problem_of


def captured(blocks: int, rows: int = 8) -> tuple[PlanningProblem, TrainingGraph]:
    with torch.device("meta"):
        model, x = Stack(lambda: GPTBlock(1024, 8), blocks), torch.empty(rows, 512, 1024)
    strategy = autopar.Strategy(tp=4)
    cluster = autopar.Cluster.named("dgx-h100")
    more: dict[str, Any] = {"world_size": 8, "cluster": cluster, "comm_backend": "nccl"}
    return problem_of(model, strategy, **more), capture_of_rank(model, (x,), 0, 2)


def test_more_blocks_have_the_strategies_of_their_kind() -> None:
    carried = SolvedAxes()
    for blocks in (2, 4):
        problem, graph = captured(blocks)
        machine = known_machine(problem, 1)
        found = build_evaluator(problem, graph, machine, carried=carried).setup
    assert len(carried.known) == 1
    own = build_evaluator(problem, graph, machine).setup
    assert found.op_strategies == own.op_strategies
    assert len(found.op_strategies[0]) > 100


@pytest.mark.parametrize("for_all_rows", [False, True])
def test_other_rows_are_solved_for_unless_asked(for_all_rows: bool) -> None:
    carried = SolvedAxes(for_all_rows)
    for rows in (8, 16):
        problem, graph = captured(2, rows)
        build_evaluator(problem, graph, known_machine(problem, 1), carried=carried)
    assert len(carried.known) == (1 if for_all_rows else 2)


def test_another_model_is_solved_for() -> None:
    carried = SolvedAxes()
    problem, graph = captured(2)
    machine = known_machine(problem, 1)
    solved = solve_axis(problem, "tp", graph, machine)
    carried.get("tp", {"tp": 4}, graph, {}, lambda: solved)
    with torch.device("meta"):
        other = torch.nn.Sequential(torch.nn.Linear(256, 256)), torch.empty(8, 128, 256)
    graph = capture_of_rank(other[0], (other[1],), 0, 2)
    assert carried.get("tp", {"tp": 4}, graph, {}, lambda: ()) == ()
