"""`plan_model`: the plan of a model for ranks that need not run, as `autopar.plan` returns it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from autopar.capture.call import last_part
from autopar.capture.model_info import describe_parameters, device_of
from autopar.core.plan.plan import Plan
from autopar.cost_model.cluster.cluster import Cluster
from autopar.options import CompileOptions, priced_precision
from autopar.planner.problem import PlanningProblem
from autopar.planner.search.search_progress import ReportProgress
from autopar.runtime.planned_module import check_not_compiled
from autopar.session.local_steps import with_local_steps
from autopar.session.offline import plan_offline
from autopar.session.prepare import make_problem


def plan_model(
    model: nn.Module,
    options: CompileOptions,
    progress: ReportProgress = lambda progress: None,
) -> Plan:
    """The fastest plan for `options.world_size` ranks, with example inputs.

    Raises: what `autopar.plan` lists.
    """
    assert options.world_size is not None
    check_not_compiled(model)
    world_size, cluster = options.world_size, options.cluster
    device, parameters = device_of(model), describe_parameters(model)
    autocast, notes = priced_precision(options.precision, cluster, parameters.values())
    comm_backend = cluster.backend if cluster else "gloo" if device.type == "cpu" else "nccl"
    problem = make_problem(
        model,
        options,
        parameters,
        world_size,
        device,
        autocast,
        cluster or Cluster.default(world_size, device.type),
        comm_backend,
    )

    def plan_part(problem: PlanningProblem, inputs: Any) -> Plan:
        return plan_offline(
            problem,
            model,
            inputs,
            autocast,
            options.loss_fn,
            options.time_limit_s,
            progress,
        )

    plan = plan_part(problem, options.example_inputs)
    if problem.strategy.may_sync:

        def plan_group(group: PlanningProblem, groups: int) -> Plan:
            inputs = options.example_inputs
            if options.batch == "global":
                inputs = last_part(inputs, groups)
            return plan_part(group, inputs)

        plan = with_local_steps(plan, problem, plan_group)
    return replace(plan, notes=(*notes, *plan.notes))
