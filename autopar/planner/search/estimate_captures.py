"""`MeshEstimator`: estimates of meshes from captures of a model with few of its blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property

import numpy as np
from torch import nn

from autopar.capture.batch_slices import CaptureCache
from autopar.capture.model_info import describe_parameters
from autopar.capture.repeated_blocks import BlockKind, RepeatedBlocks
from autopar.core.ir.graph import ParameterInfo, TrainingGraph
from autopar.core.plan.partition import rows_of
from autopar.errors import BatchError, CaptureError
from autopar.planner.machine import Machine, known_machine
from autopar.planner.placement.carry import SolvedAxes
from autopar.planner.problem import PlanningProblem
from autopar.planner.search.mesh_estimate import (
    Figures,
    MeshEstimate,
    MicroBatchFigures,
    estimate_mesh,
    interpolate_slices,
    micro_batch_figures,
)
from autopar.planner.search.state_bytes import padding as padding_of

SAMPLED_LAYERS = 2
"""Blocks kept of each kind: the first and its neighbour."""

SIZE_RATIO = 8
"""Ratio of the rows of the two sampled micro-batches; the larger one is used without stages."""

CaptureSlice = Callable[[int, CaptureCache], TrainingGraph]
"""Captures a slice of the batch, given the number of slices and the captures to reuse."""


class MeshEstimator:
    """Estimates the step time and memory of problems that fix a mesh.

    The estimator times nothing: operators have earlier measured times, or modelled times. For each
    division along tp, cp and ep, two sizes of micro-batches are lowered and others interpolated.
    Captures leave out repeated blocks if a model is given. `sharing` ranks share a host's cores.
    `captures` are reused, and extended, by the number of blocks of each kind.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        capture_slice: CaptureSlice,
        model: nn.Module | None = None,
        *,
        sharing: int = 1,
        captures: dict[tuple[int, ...], CaptureCache] | None = None,
    ) -> None:
        self._problem, self._capture_slice = problem, capture_slice
        self._model, self._sharing = model, sharing
        self._kinds = [] if model is None else kinds_of(model, problem.blocks)
        self._captures = {} if captures is None else captures
        # Strategies for other rows are good enough to order meshes. A planned mesh solves its own.
        self._solved = SolvedAxes(for_all_rows=True)
        self._graph, self._figures = cache(self._capture), cache(self._lower)
        self._padding = cache(lambda ranks: padding_of(problem.parameters.values(), ranks))

    def __call__(self, problem: PlanningProblem) -> MeshEstimate:
        """The estimate of a problem whose strategy fixes mesh and micro-batches.

        Raises:
            BatchError: there are too few rows, or a number that is left open does not divide them.
        """
        strategy, rows = problem.strategy, self._rows
        micro_batches = strategy.micro_batches or 1
        slices = problem.dp_size * micro_batches
        is_open = self._problem.strategy.micro_batches is None
        if slices > rows or (is_open and micro_batches > 1 and rows % slices):
            raise BatchError(f"{rows} rows cannot be cut into {slices} equal slices")
        axes = tuple(strategy.axes.items())
        figures = {
            count: self._figures(axes, count)
            for count in self._sampled(problem.dp_size * strategy.pp_size)
        }
        micro_batch = interpolate_slices(figures, slices)
        padding = self._padding(problem.shard_ranks)
        estimate = estimate_mesh(problem, micro_batch, self._machine, padding)
        if [*strategy.axes] != ["tp"] or slices * strategy.axes["tp"] > rows:
            return estimate
        own = [figures[slices]] if slices in figures else figures.values()
        divides = any(each.summed_bytes < self._trained_bytes for each in own)
        return replace(estimate, divides=divides)

    def floor_s(self) -> float:
        """Lower bound in seconds of a step on any mesh: an even share of the whole batch's compute.

        An operator on a shard takes at least its share of the time of the whole operator.
        """
        return self._figures((), 1).compute_s / self._problem.world_size

    def _sampled(self, ranks: int) -> tuple[int, int]:
        """Numbers of slices that are lowered for a mesh with so many ranks of data or stages."""
        small = min(SIZE_RATIO * ranks, self._rows)
        return max(1, small // SIZE_RATIO), small

    @cached_property
    def _trained_bytes(self) -> int:
        infos = self._problem.parameters.values()
        return sum(info.bytes for info in infos if info.requires_grad)

    @cached_property
    def _machine(self) -> Machine:
        return known_machine(self._problem, self._sharing)

    @cached_property
    def _rows(self) -> int:
        # One slice would be the whole batch, of which `rows_of` returns 0.
        try:
            return 2 * rows_of(self._graph((SAMPLED_LAYERS,) * len(self._kinds), 2)[0])
        except BatchError:
            return 1  # as of a long row, which cannot be cut in two

    def _capture(
        self, layers: tuple[int, ...], slices: int
    ) -> tuple[TrainingGraph, dict[str, ParameterInfo]]:
        """A captured slice and its parameters, with a number of blocks of each kind."""
        if self._model is not None and self._kinds:
            try:
                with with_num_layers(self._model, self._kinds, layers):
                    graph = self._capture_slice(slices, self._captures.setdefault(layers, {}))
                    return graph, dict(describe_parameters(self._model))
            except CaptureError:
                self._kinds = []  # a layer behind all blocks may count on their number
        graph = self._capture_slice(slices, self._captures.setdefault((), {}))
        return graph, dict(self._problem.parameters)

    def _lower(self, axes: tuple[tuple[str, int], ...], slices: int) -> MicroBatchFigures:
        """Figures of one slice of the batch, with the model partitioned along `axes`."""
        open_strategy = self._problem.strategy
        strategy = replace(
            replace(open_strategy, **dict(axes)),  # type: ignore[arg-type]
            pp=None,
            split_points=None,
            schedule=None,
            stages_per_rank=None,
            # A mapping may name blocks that the reduced model lacks, which is a StrategyError.
            zero=open_strategy.zero if isinstance(open_strategy.zero, int) else None,
            micro_batches=slices,
            search=(),
        )

        def with_layers(layers: Sequence[int]) -> Figures:
            graph, parameters = self._graph(tuple(layers), slices)
            problem = replace(self._problem, parameters=parameters, strategy=strategy)
            return np.array(micro_batch_figures(problem, graph, self._machine, self._solved))

        return MicroBatchFigures(*map(float, extrapolate_layers(self._kinds, with_layers)))


def kinds_of(model: nn.Module, blocks: Sequence[str]) -> list[BlockKind]:
    """The kinds of equal blocks that have more blocks than the samples need."""
    kinds = RepeatedBlocks(model, blocks).kinds
    return [kind for kind in kinds if len(kind.modules) > SAMPLED_LAYERS + 1]


@contextlib.contextmanager
def with_num_layers(
    model: nn.Module, kinds: Sequence[BlockKind], layers: Sequence[int]
) -> Iterator[None]:
    """Keeps the first `layers` blocks of each kind in a model, and restores the others on exit."""
    removed = {
        id(modules[0])
        for kind, count in zip(kinds, layers, strict=True)
        for modules in kind.modules[count:]
    }
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    # Deleting children would renumber the others. The old dict restores every name at once.
    before = [(each, each._modules) for each in lists]
    try:
        for each in lists:
            left = [child for child in each if id(child) not in removed]
            each._modules = {str(index): child for index, child in enumerate(left)}
        yield
    finally:
        for each, modules in before:
            each._modules = modules


def sampled_layers(lengths: Sequence[int]) -> dict[tuple[int, ...], int]:
    """Numbers of blocks to keep of each kind, with the number of times their figures recur.

    The fewest come first, then one more of each kind. Kinds of equal length grow together, because
    only the sum of their figures counts.
    """
    growing = dict.fromkeys(lengths)
    more = (tuple(SAMPLED_LAYERS + (own == length) for own in lengths) for length in growing)
    recurring = (length - SAMPLED_LAYERS for length in growing)
    return {(SAMPLED_LAYERS,) * len(lengths): 1} | dict(zip(more, recurring, strict=True))


def extrapolate_layers(
    kinds: Sequence[BlockKind], figures_with: Callable[[Sequence[int]], Figures]
) -> Figures:
    """Figures of the whole model, which grow linearly with the blocks of each kind."""
    few, *others = sampled_layers([len(kind.modules) for kind in kinds]).items()
    total = base = figures_with(few[0])
    for layers, times in others:
        total = total + (figures_with(layers) - base) * times
    return total
