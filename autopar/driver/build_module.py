"""`build_module`: the distributed module of a call of `compile`."""

from __future__ import annotations

from typing import Any

import torch

from autopar.arguments import precision_of
from autopar.capture.call import flattened
from autopar.capture.stated_rows import StatedRows
from autopar.common.groups import backend_of
from autopar.driver.live import LivePlanner
from autopar.driver.prepare import check_call_agrees, make_problem, take_over
from autopar.plan.spec import check_plan
from autopar.profiler.profiler import profiler
from autopar.runtime.agreement.consensus import run_on_all_ranks
from autopar.runtime.codegen.cuda_graphs import check_machine, check_strategy
from autopar.runtime.module import DistributedModule
from autopar.runtime.options import Options


def build_module(
    given: Any, device: torch.device, ranks: int, kind: Any = DistributedModule
) -> DistributedModule:
    """A module of a kind for the ranks of the world; `given` has the arguments of `compile`."""
    model, plan = given.model, given.plan
    parameters = take_over(model)
    recorder = profiler(given.optimizer, device)
    autocast = precision_of(given.precision)
    if plan is not None and given.precision is None and plan.precision is not None:
        autocast = getattr(torch, plan.precision)
    comm_backend, arguments = backend_of(device), vars(given)
    problem = make_problem(
        arguments, parameters, ranks, device, autocast, given.cluster, comm_backend
    )
    check_call_agrees(problem, arguments)
    if plan is not None:
        run_on_all_ranks(lambda: check_plan(plan, model, parameters.values(), ranks))
    fixed = problem.strategy if plan is None else plan
    if given.cuda_graphs:
        check_machine(device, comm_backend, ranks)
        check_strategy(fixed)
    options = Options(
        batch=given.batch,
        loss_fn=given.loss_fn,
        precision=autocast,
        backend=given.backend,
        ranks=ranks,
        model_parallel_size=fixed.model_parallel_size,
        pp_size=fixed.pp_size,
        recorder=recorder,
        local=fixed.batch_semantics == "local",
        max_programs=given.max_programs,
        cuda_graphs=given.cuda_graphs,
        static=tuple(given.static),
        outputs=given.outputs,
        rows=StatedRows.of(given.rows, model),
    )
    fallback = given.fallback and not given.cuda_graphs
    limits = given.time_limit_s, given.trials
    planner = LivePlanner(problem, plan, fallback, *limits, recorder, given.plain)
    hooks = planner.make_plan, planner.make_fallback, planner.make_strategies
    module: DistributedModule = kind(model, parameters, device, options, *hooks)
    may_shard = problem.strategy.zero != 0 or options.model_parallel_size > 1
    is_late = plan is None and given.example_inputs is None
    is_late = is_late and (may_shard or bool(problem.strategy.search))
    module.broadcast_parameters(replicated_dtensors=is_late, init_fn=given.init_fn)
    if given.example_inputs is not None:
        module.plan_for(*module.group_arguments(*flattened(given.example_inputs)))
    elif plan is not None:
        module.apply_plan(planner.agreed(plan))
    return module
