"""Planning problems as `autopar.plan` makes them."""

from typing import Any

import torch
from torch import nn

import autopar
from autopar.capture.model_info import describe_parameters
from autopar.planner.problem import PlanningProblem


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
