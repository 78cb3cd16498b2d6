"""Where outlines of meshes come from: captures of a model with few of its blocks, modelled."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from autopar.capture.model_info import describe_parameters
from autopar.capture.offline import Known
from autopar.errors import BatchError
from autopar.ir.graph import ParameterInfo, TrainingGraph
from autopar.plan.partition import rows_of
from autopar.planner.machine import Machine, known_machine
from autopar.planner.search.fixed_mesh import PlanningProblem
from autopar.planner.search.layer_extrapolation import (
    KEPT,
    extrapolate_layers,
    kinds_of,
    with_num_layers,
)
from autopar.planner.search.mesh_estimate import (
    Figures,
    MeshEstimate,
    MicroBatch,
    between,
    estimate_mesh,
    micro_batch_of,
)
from autopar.planner.search.mesh_search import EstimateMesh

SMALLER = 8
"""How many times less rows a small micro-batch has than a large one, the most without stages."""

Captured = Callable[[int, Known], TrainingGraph]
"""Captures one of so many slices of the batch; what is known is not captured again."""


def mesh_estimator(
    problem: PlanningProblem,
    captured: Captured,
    model: nn.Module | None = None,
    *,
    sharing: int = 1,
) -> EstimateMesh:
    """What answers questions without an open mesh by outlines.

    Nothing is timed: operators that were are priced so, the others as modelled. Along the same axes
    two sizes of micro-batches are looked at, a large and a small one; what others take follows.

    Args:
        problem: with an open mesh.
        captured: captures what is asked for.
        model: the model that is captured, if repeated blocks may be left out of it meanwhile.
        sharing: ranks that share a host's cores.
    """
    kinds = [] if model is None else kinds_of(model, problem.blocks)
    known = defaultdict[tuple[int, ...], Known](dict)
    cluster, strategy = problem.cluster, problem.strategy
    assert cluster is not None

    @functools.cache
    def machine() -> Machine:
        return known_machine(
            problem.device,
            cluster,
            problem.optimizer,
            sharing=sharing,
            backend=problem.backend,
            dtype=problem.dtype,
        )

    @functools.cache
    def few(kept: tuple[int, ...], slices: int) -> tuple[TrainingGraph, dict[str, ParameterInfo]]:
        if model is None or not kinds:
            return captured(slices, known[()]), dict(problem.parameters)
        with with_num_layers(model, kinds, kept):
            return captured(slices, known[kept]), dict(describe_parameters(model))

    @functools.cache
    def figures(axes: tuple[tuple[str, int], ...], slices: int) -> MicroBatch:
        zero = strategy.zero if isinstance(strategy.zero, int) else None
        within = replace(
            replace(strategy, **dict(axes)),  # type: ignore[arg-type]
            pp=None,
            split_points=None,
            schedule=None,
            stages_per_rank=None,
            zero=zero,
            micro_batches=slices,
            search=(),
        )

        def at(kept: Sequence[int]) -> Figures:
            graph, parameters = few(tuple(kept), slices)
            own = replace(problem, parameters=parameters, strategy=within)
            return micro_batch_of(own, graph, machine()).figures

        return MicroBatch.of(extrapolate_layers(kinds, at))

    @functools.cache
    def rows() -> int:
        return 2 * rows_of(few((KEPT,) * len(kinds), 2)[0])

    def sketch(own: PlanningProblem) -> MeshEstimate:
        count = own.strategy.micro_batches or 1
        slices = own.dp_size * count
        if slices > rows() or (count > 1 and rows() % slices):
            raise BatchError(f"{rows()} rows cannot be cut into {slices} equal slices")
        axes = tuple(own.strategy.axes.items())
        small = min(SMALLER * own.dp_size * own.strategy.pp_size, rows())
        sizes = (max(1, small // SMALLER), small)
        micro = between({size: figures(axes, size) for size in sizes}, slices)
        return estimate_mesh(own, micro, machine())

    return sketch
