"""How a captured micro-batch becomes the programs of stages: the same for plans and what runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.graph import Gradient, Parameter, TrainingGraph
from autopar.partition import Ways
from autopar.passes.accumulate_micro_batches import BATCH
from autopar.passes.base import Pass
from autopar.passes.runner import run_passes
from autopar.passes.split_stages import Stages, split_stages
from autopar.plan import Plan


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
