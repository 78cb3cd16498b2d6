"""Checks and preparation of a model on all ranks, before its calls are planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.arguments import dtype_name, memory_of, strategy_of
from autopar.capture.channels_last import mark_channels_last
from autopar.capture.model_info import describe_parameters
from autopar.cost_model.cluster.cluster import Cluster
from autopar.ir.graph import ParameterInfo
from autopar.passes.registration import DISABLE, pass_settings
from autopar.plan.spec import fingerprint
from autopar.planner.problem import PlanningProblem
from autopar.runtime.agreement.captured_graph import versions
from autopar.runtime.agreement.consensus import assert_same_across_ranks
from autopar.runtime.parameters.distribute import check_plain, make_contiguous
from autopar.runtime.planned_module import check_not_compiled


def take_over(model: nn.Module) -> Mapping[str, ParameterInfo]:
    """Makes the tensors of a model contiguous and describes its parameters.

    Raises:
        DisagreementError: ranks have different models, passes, or versions of torch or autopar.
        ModelError: the model is compiled or sharded already.
    """
    check_not_compiled(model)
    check_plain(model)
    mark_channels_last(model)
    make_contiguous(model)
    parameters = describe_parameters(model)
    buffers = str([(name, tuple(b.shape), b.dtype) for name, b in model.named_buffers()])
    described = fingerprint(parameters.values()), buffers
    assert_same_across_ranks(versions(), "Install the same versions on every rank.")
    assert_same_across_ranks({"model": described}, "Build the same model on every rank.")
    assert_same_across_ranks(
        {"set of passes": pass_settings()},
        f"Set {DISABLE} and register passes alike on every rank.",
    )
    return parameters


def make_problem(
    arguments: Mapping[str, Any],
    parameters: Mapping[str, ParameterInfo],
    world_size: int,
    device: torch.device,
    autocast: torch.dtype | None,
    cluster: Cluster | None,
    comm_backend: str,
) -> PlanningProblem:
    """The planning problem of a call of `compile` or `plan`, given its arguments by name.

    Raises:
        StrategyError: arguments contradict each other, the model or the world.
    """
    names = ("strategy", "batch", "lossy", "reduce_precision")
    return PlanningProblem(
        model=type(arguments["model"]).__name__,
        parameters=parameters,
        world_size=world_size,
        strategy=strategy_of(*(arguments[name] for name in names)),
        memory=memory_of(arguments["memory"]),
        batch=arguments["batch"],
        precision=dtype_name(autocast),
        optimizer=arguments["optimizer"],
        cluster=cluster and cluster.spanning(world_size),
        device=device,
        comm_backend=comm_backend,
        backend=arguments["backend"],
    )


def check_call_agrees(problem: PlanningProblem, arguments: Mapping[str, Any]) -> None:
    """Checks that all ranks called `compile` alike, given its arguments by name.

    Raises:
        DisagreementError: they did not.
    """
    optional = ("example_inputs", "loss_fn", "cluster", "plan")
    settings = {
        "batch mode": problem.batch,  # first, as the strategy depends on it
        "outputs": arguments["outputs"],
        "rows": arguments["rows"],
        "strategy": problem.strategy,
        "precision": problem.precision,
        "backend": arguments["backend"],
        "choice of CUDA graphs": arguments["cuda_graphs"],
        "memory cap": problem.memory,
        "verification": arguments["verify"],
        "number of programs to keep": arguments["max_programs"],
        "static arguments": tuple(arguments["static"]),
        "optimizer": problem.base().optimizer,
        f"idea of what is given ({', '.join(optional)})": [
            arguments[name] is not None for name in optional
        ],
    }
    assert_same_across_ranks(settings, "Call autopar.compile alike on every rank.")
