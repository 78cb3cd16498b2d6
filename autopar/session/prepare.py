"""Checks and preparation of a model on all ranks, before its calls are planned."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar._torch import pytree
from autopar.capture.channels_last import mark_channels_last
from autopar.capture.model_info import describe_parameters
from autopar.core.ir.graph import ParameterInfo
from autopar.core.plan.decisions import fingerprint
from autopar.cost_model.cluster.cluster import Cluster
from autopar.errors import DisagreementError
from autopar.options import CompileOptions, dtype_name
from autopar.passes.registration import DISABLE, pass_settings
from autopar.planner.problem import PlanningProblem
from autopar.runtime.agreement.captured_graph import versions
from autopar.runtime.agreement.consensus import (
    assert_same_across_ranks,
    broadcast_from_rank0,
    gather_objects,
)
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
    # first, since contiguous weights no longer show that they were channels-last
    mark_channels_last(model)
    make_contiguous(model)
    parameters = describe_parameters(model)
    buffers = str([(name, tuple(b.shape), b.dtype) for name, b in model.named_buffers()])
    described = fingerprint(parameters.values()), buffers
    assert_same_across_ranks(versions(), "Install the same versions on every rank.")
    try:
        assert_same_across_ranks({"model": described}, "Build the same model on every rank.")
    except DisagreementError:  # of all ranks at once
        raise DisagreementError(_first_difference(model)) from None  # it says all, and more
    assert_same_across_ranks(
        {"set of passes": pass_settings()},
        f"Set {DISABLE} and register passes alike on every rank.",
    )
    return parameters


def _first_difference(model: nn.Module) -> str:
    """The first tensor of a model that is another on some rank than on rank 0, in words."""
    kinds = (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
    own = [
        f"{kind} {name} of {dtype_name(x.dtype)}{list(x.shape)}"
        + ("" if x.requires_grad or kind == "buffer" else " that is frozen")
        for kind, tensors in kinds
        for name, x in tensors
    ]
    pairs = itertools.zip_longest(own, broadcast_from_rank0(lambda: own), fillvalue="nothing")
    difference = next((pair for pair in pairs if pair[0] != pair[1]), None)
    found = gather_objects(difference)
    odd = [index for index, pair in enumerate(found) if pair is not None]
    there, here = found[odd[0]] if odd else ("the same tensors", "others of their kind")
    ranks = ", ".join(map(str, odd)) or "some"
    return (
        f"ranks hold different models: rank {ranks} another than rank 0. First difference: {there} "
        f"where rank 0 has {here}. Build the same model on every rank."
    )


def make_problem(
    model: nn.Module,
    options: CompileOptions,
    parameters: Mapping[str, ParameterInfo],
    world_size: int,
    device: torch.device,
    autocast: torch.dtype | None,
    cluster: Cluster | None,
    comm_backend: str,
) -> PlanningProblem:
    """The planning problem of a model for the ranks of a machine.

    Raises:
        StrategyError: options contradict each other, the model or the world.
    """
    return PlanningProblem(
        model=type(model).__name__,
        parameters=parameters,
        world_size=world_size,
        strategy=options.fixed,
        memory=options.memory_bytes,
        batch=options.batch,
        precision=dtype_name(autocast),
        optimizer=options.optimizer,
        cluster=cluster and cluster.spanning(world_size),
        device=device,
        comm_backend=comm_backend,
        backend=options.backend,
        row_length=row_length(options.example_inputs),
        rows=num_rows(options.example_inputs) * (world_size if options.batch == "local" else 1),
    )


def row_length(inputs: Any) -> int:
    """Most elements of a row of the inputs along one dim; 0 without any."""
    leaves = (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    return max((size for leaf in leaves for size in leaf.shape[1:]), default=0)


def num_rows(inputs: Any) -> int:
    """Most elements of the inputs along their first dim; 0 without any."""
    leaves = (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    return max((leaf.shape[0] for leaf in leaves if leaf.dim()), default=0)


def check_call_agrees(problem: PlanningProblem, options: CompileOptions) -> None:
    """Checks that all ranks called `compile` alike.

    Raises:
        DisagreementError: they did not.
    """
    optional = ("example_inputs", "loss_fn", "cluster", "plan")
    settings = {
        "batch mode": problem.batch,  # first, as the strategy depends on it
        "outputs": options.outputs,
        "rows": options.rows,
        "strategy": problem.strategy,
        "precision": problem.precision,
        "backend": options.backend,
        "choice of CUDA graphs": options.cuda_graphs,
        "memory cap": problem.memory,
        "verification": options.verify,
        "number of programs to keep": options.max_programs,
        "static arguments": tuple(options.static),
        "optimizer": problem.optimizer_name,
        f"idea of what is given ({', '.join(optional)})": [
            getattr(options, name) is not None for name in optional
        ],
    }
    assert_same_across_ranks(settings, "Call autopar.compile alike on every rank.")
