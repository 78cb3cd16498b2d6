"""`whole_setup`: the setup of a whole model's evaluator, from that of a reduced model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.partition import Partition
from autopar.core.plan.prediction import Work
from autopar.planner.evaluate.setup import EvaluationSetup
from autopar.planner.extended.reduced_models import ReducedModel, ReducedModels
from autopar.planner.machine import Machine
from autopar.planner.problem import PlanningProblem, SearchContext
from autopar.planner.work import work_of


def whole_setup(
    problem: PlanningProblem,
    models: ReducedModels,
    reduced: ReducedModel,
    setup: EvaluationSetup,
    context: SearchContext,
) -> EvaluationSetup:
    """The setup of the whole model, from that of a reduced one."""
    own = setup.base
    changed = tuple(name for one in own.changed for name in _names(models, reduced, one))
    base = replace(
        problem.base(),
        levels=own.levels,
        changed=changed,
        partitions=tuple(_whole_partition(models, reduced, each) for each in own.partitions),
        notes=own.notes,
    )
    kept = {name: info for name, info in problem.parameters.items() if name not in changed}
    return replace(
        setup,
        graph=replace(reduced.graph, parameters=kept),
        parameters=problem.parameters,
        base=base,
        op_strategies=(),
        note=context.note,
        deadline=context.deadline,
    )


def reduced_work(
    problem: PlanningProblem, graph: TrainingGraph, count: int, machine: Machine
) -> Work:
    """Work of a step of a reduced model, of which a micro-batch was captured."""
    dtype = problem.precision or str(problem.dtype).removeprefix("torch.")
    return work_of(graph, count * problem.dp_size, machine.cluster, dtype)


def _names(models: ReducedModels, reduced: ReducedModel, name: str) -> Iterator[str]:
    """Parameters of the whole model that a parameter of the reduced one stands for.

    The last kept block of a kind stands for all that are left out.
    """
    own = reduced.names[name]
    yield own
    block = reduced.blocks[reduced.parameters[name].block]
    alike = models.alike(block)
    kept = [each for each in alike if each in reduced.blocks.values()]
    if len(alike) > len(kept) and block == kept[-1]:
        for other in alike[len(kept) :]:
            yield other + own.removeprefix(block)


def whole_table(
    models: ReducedModels, reduced: ReducedModel, items: Sequence[tuple[str, object]]
) -> Iterator[tuple[str, object]]:
    """Values by parameter of the whole model, from those by parameter of the reduced one."""
    for name, value in items:
        for whole in _names(models, reduced, name):
            yield whole, value


def _whole_partition(models: ReducedModels, reduced: ReducedModel, own: Partition) -> Partition:
    """Placements of all parameters; ranks find the strategies of operators that fit them."""
    parameters = tuple(whole_table(models, reduced, own.parameters))
    return replace(own, parameters=parameters, graph="", rows=0, strategies=())  # type: ignore[arg-type]
