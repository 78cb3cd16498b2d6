"""Planning problems as `autopar.plan` makes them."""

from typing import Any

import torch
from torch import nn

import autopar
from autopar.capture.batch_slices import capture_of_rank
from autopar.capture.model_info import describe_parameters
from autopar.planner.evaluate.candidate import Candidate, default_config
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.machine import known_machine
from autopar.planner.problem import PlanningProblem
from autopar.planner.search.build_evaluator import build_evaluator
from autopar.planner.search.pipeline_search import open_pipelines


def evaluator_of(
    model: nn.Module, inputs: tuple[Any, ...], problem: PlanningProblem
) -> tuple[Evaluator, Candidate]:
    """The evaluator of a model on a cluster that is not here, and its plan under ZeRO 3."""
    strategy, parts = problem.strategy, problem.strategy.micro_batches or 1
    graph = capture_of_rank(model, inputs, 0, problem.dp_size, micro_batches=parts)
    spmd = build_evaluator(problem, graph, known_machine(problem, 1))
    found: Evaluator = spmd
    if strategy.pipelined:
        found = next(open_pipelines(spmd, strategy, parts))
    return found, found.evaluate(default_config(strategy, problem.blocks, 3))


def problem_of(model: nn.Module, strategy: autopar.Strategy, **more: Any) -> PlanningProblem:
    """Four ranks on CPUs; `more` are other fields of the problem."""
    return PlanningProblem(
        model=type(model).__name__,
        parameters=describe_parameters(model),
        strategy=strategy,
        precision=None,
        optimizer=torch.optim.AdamW,
        device=torch.device("cpu"),
        **{
            "world_size": 4,
            "memory": None,
            "batch": "global",
            "cluster": None,
            "comm_backend": "gloo",
        }
        | more,
    )
