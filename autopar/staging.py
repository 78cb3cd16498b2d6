"""How a captured micro-batch becomes the programs of stages: the same for plans and what runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.graph import Gradient, Parameter, TrainingGraph
from autopar.partition import Ways
from autopar.passes.base import Pass
from autopar.passes.data_parallel.slices import BATCH
from autopar.passes.keep_gathered import gathered_once, giving, taking
from autopar.passes.runner import run_passes
from autopar.passes.split_stages import Stages, split_stages
from autopar.plan import Plan

T = TypeVar("T")


def placed(
    graph: TrainingGraph, plan: Plan, rank: int, ways: Sequence[Ways], micro_batches: int
) -> TrainingGraph:
    """The graph of a captured micro-batch, every operator of it with its stage."""
    graph = replace(graph, axes=plan.axes)
    if micro_batches > 1:
        graph = replace(graph, axes={**graph.axes, BATCH: plan.data_ranks * micro_batches})
    passes = plan.model_passes(rank, ways=ways, micro_batches=micro_batches)
    return replace(run_passes(graph, passes), axes=plan.axes)  # micro-batches are no ranks


def cut(
    graph: TrainingGraph, plan: Plan, rank: int, ways: Sequence[Ways], micro_batches: int
) -> Stages:
    """The graphs of all stages of a captured micro-batch, as a rank sees them.

    Args:
        graph: of one micro-batch.
        plan: with a pipeline.
        rank: this rank in the world.
        ways: of the graph before each axis that the model is partitioned along.
        micro_batches: into how many the rows of a rank are cut.
    """
    assert plan.pipeline is not None
    return split_stages(placed(graph, plan, rank, ways, micro_batches), plan.pipeline.stages)


def passes_of_stage(
    graph: TrainingGraph,
    plan: Plan,
    rank: int,
    backend: str,
    *,
    micro_batches: int,
    hold: bool = False,
    held: tuple[str, ...] = (),
    compiled: bool = False,
) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """What lowers a stage for the last micro-batch, and for those before it.

    The last one also reduces the gradients that were kept until then.

    Args:
        graph: of the stage.
        plan: with a pipeline.
        rank: this rank in the world.
        backend: the torch.distributed backend that collectives are lowered for.
        micro_batches: how many there are.
        hold: keep gradients local (`no_sync`).
        held: parameters with gradients held from earlier calls.
        compiled: whether a compiler follows.
    """
    gradients = (r.of for r in graph.outputs if isinstance(r, Gradient))
    trained = {of.name for of in gradients if isinstance(of, Parameter)}
    several = plan.data_ranks > 1 and micro_batches > 1
    kept = () if hold or not several else tuple(n for n in plan.undivided if n in trained)
    own = tuple(n for n in dict.fromkeys((*held, *kept)) if n in graph.parameters)
    last = plan.stage_passes(rank, backend, hold=hold, held=() if hold else own, compiled=compiled)
    more = plan.stage_passes(rank, backend, hold=hold, accumulate=True, compiled=compiled)
    return last, more if several else last


@dataclass(frozen=True)
class Turns:
    """A stage lowered, as the micro-batches of a step run it.

    Attributes:
        first: of which the first runs the forward: what is gathered once a step, it gathers.
        more: of all but the last, and the forward of those behind the first.
        last: of the last: it also reduces the gradients that were kept until then.
    """

    first: TrainingGraph
    more: TrainingGraph
    last: TrainingGraph

    def of_each(self, run: Callable[[TrainingGraph], T]) -> tuple[T, T, T]:
        """What a function gives for the first, more and last, once where they are the same."""
        last = run(self.last)
        more = last if self.more is self.last else run(self.more)
        return (more if self.first is self.more else run(self.first)), more, last

    def counted(self, micro_batches: int) -> Iterator[tuple[TrainingGraph, int]]:
        """What so many micro-batches run, and how often: one alone is the last."""
        yield self.last, 1
        if micro_batches > 1:
            yield self.more, micro_batches - 2
            yield self.first, 1


def turns_of_stage(
    graph: TrainingGraph, passes: tuple[Sequence[Pass], Sequence[Pass]], plan: Plan, count: int
) -> Turns:
    """A stage as its micro-batches run it.

    Args:
        graph: of the stage.
        passes: those of `passes_of_stage`.
        plan: with a pipeline.
        count: how many micro-batches there are.
    """
    at_last, before = passes
    last = run_passes(graph, at_last)
    more = last if before == at_last else run_passes(graph, before)
    zero = dict(plan.stages)
    if count == 1 or not gathered_once(more, zero):
        return Turns(more, more, last)
    later = taking(more, zero)
    return Turns(giving(more, zero), later, later if last is more else taking(last, zero))
