"""`MeshEstimator`: estimates of meshes from captures of a model with few of its blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property

from torch import nn

from autopar.capture.batch_slices import CaptureCache
from autopar.capture.model_info import describe_parameters
from autopar.errors import BatchError
from autopar.ir.graph import ParameterInfo, TrainingGraph
from autopar.plan.partition import rows_of
from autopar.planner.machine import Machine, known_machine
from autopar.planner.problem import PlanningProblem
from autopar.planner.search.layer_extrapolation import (
    SAMPLED_LAYERS,
    extrapolate_layers,
    kinds_of,
    with_num_layers,
)
from autopar.planner.search.mesh_estimate import (
    Figures,
    MeshEstimate,
    MicroBatchFigures,
    estimate_mesh,
    interpolate_slices,
    micro_batch_figures,
)

SIZE_RATIO = 8
"""Ratio of the rows of the two sampled micro-batches; the larger one is used without stages."""

CaptureSlice = Callable[[int, CaptureCache], TrainingGraph]
"""Captures a slice of the batch, given the number of slices and the captures to reuse."""


class MeshEstimator:
    """Estimates the step time and memory of problems that fix a mesh.

    The estimator times nothing: operators have earlier measured times, or modelled times. For each
    division along tp, cp and ep, two sizes of micro-batches are lowered and others interpolated.

    Args:
        problem: problem with an open mesh.
        capture_slice: captures a slice of the batch.
        model: the model, if captures may leave out repeated blocks; else None.
        sharing: number of ranks that share the cores of a host.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        capture_slice: CaptureSlice,
        model: nn.Module | None = None,
        *,
        sharing: int = 1,
    ) -> None:
        self._problem, self._capture_slice = problem, capture_slice
        self._model, self._sharing = model, sharing
        self._kinds = [] if model is None else kinds_of(model, problem.blocks)
        self._captures = defaultdict[tuple[int, ...], CaptureCache](dict)
        self._graphs: dict[Hashable, tuple[TrainingGraph, dict[str, ParameterInfo]]] = {}
        self._figures: dict[Hashable, MicroBatchFigures] = {}

    def __call__(self, problem: PlanningProblem) -> MeshEstimate:
        """The estimate of a problem whose strategy fixes mesh and micro-batches.

        Raises:
            BatchError: the rows cannot be divided into equal micro-batches.
        """
        strategy, rows = problem.strategy, self._rows
        micro_batches = strategy.micro_batches or 1
        slices = problem.dp_size * micro_batches
        if slices > rows or (micro_batches > 1 and rows % slices):
            raise BatchError(f"{rows} rows cannot be cut into {slices} equal slices")
        axes = tuple(strategy.axes.items())
        small = min(SIZE_RATIO * problem.dp_size * strategy.pp_size, rows)
        sampled = (max(1, small // SIZE_RATIO), small)
        figures = {count: self._figures_of(axes, count) for count in sampled}
        return estimate_mesh(problem, interpolate_slices(figures, slices), self._machine)

    @cached_property
    def _machine(self) -> Machine:
        problem = self._problem
        assert problem.cluster is not None
        return known_machine(
            problem.device,
            problem.cluster,
            problem.optimizer,
            sharing=self._sharing,
            backend=problem.backend,
            dtype=problem.dtype,
        )

    @cached_property
    def _rows(self) -> int:
        """Rows of the global batch."""
        return 2 * rows_of(self._graph((SAMPLED_LAYERS,) * len(self._kinds), 2)[0])

    def _graph(
        self, layers: tuple[int, ...], slices: int
    ) -> tuple[TrainingGraph, dict[str, ParameterInfo]]:
        """A captured slice and its parameters, with a number of blocks of each kind."""
        key = layers, slices
        if key in self._graphs:
            return self._graphs[key]
        if self._model is None or not self._kinds:
            found = self._capture_slice(slices, self._captures[()]), dict(self._problem.parameters)
        else:
            with with_num_layers(self._model, self._kinds, layers):
                graph = self._capture_slice(slices, self._captures[layers])
                found = graph, dict(describe_parameters(self._model))
        self._graphs[key] = found
        return found

    def _figures_of(self, axes: tuple[tuple[str, int], ...], slices: int) -> MicroBatchFigures:
        """Figures of one slice of the batch, with the model partitioned along `axes`."""
        key = axes, slices
        if key in self._figures:
            return self._figures[key]
        open_strategy = self._problem.strategy
        strategy = replace(
            replace(open_strategy, **dict(axes)),  # type: ignore[arg-type]
            pp=None,
            split_points=None,
            schedule=None,
            stages_per_rank=None,
            zero=open_strategy.zero if isinstance(open_strategy.zero, int) else None,
            micro_batches=slices,
            search=(),
        )

        def with_layers(layers: Sequence[int]) -> Figures:
            graph, parameters = self._graph(tuple(layers), slices)
            problem = replace(self._problem, parameters=parameters, strategy=strategy)
            return micro_batch_figures(problem, graph, self._machine).array

        found = MicroBatchFigures.of(extrapolate_layers(self._kinds, with_layers))
        self._figures[key] = found
        return found
