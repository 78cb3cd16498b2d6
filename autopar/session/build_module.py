"""`build_module`: the distributed module of a call of `compile`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.capture.call import flattened
from autopar.capture.stated_rows import StatedRows
from autopar.core.common.groups import backend_of
from autopar.core.environment import asks_for_plain
from autopar.core.plan.decisions import check_plan
from autopar.options import CompileOptions
from autopar.runtime.agreement.consensus import run_on_all_ranks
from autopar.runtime.codegen.cuda_graphs import check_machine, check_strategy
from autopar.runtime.module import DistributedModule
from autopar.runtime.options import Options
from autopar.session.live import LivePlanner
from autopar.session.prepare import check_call_agrees, make_problem, take_over
from autopar.session.profiler.profiler import profiler


def build_module(
    model: nn.Module,
    options: CompileOptions,
    device: torch.device,
    ranks: int,
    kind: Any = DistributedModule,
) -> DistributedModule:
    """A module of a kind for the ranks of the world."""
    plan, autocast = options.plan, options.autocast
    parameters = take_over(model)
    recorder = profiler(options.optimizer, device)
    comm_backend = backend_of(device)
    problem = make_problem(
        model, options, parameters, ranks, device, autocast, options.cluster, comm_backend
    )
    check_call_agrees(problem, options)
    if plan is not None:
        run_on_all_ranks(lambda: check_plan(plan, model, parameters.values(), ranks))
    fixed = problem.strategy if plan is None else plan
    if options.cuda_graphs:
        check_machine(device, comm_backend, ranks)
        check_strategy(fixed)
    of_calls = Options(
        batch=options.batch,
        loss_fn=options.loss_fn,
        precision=autocast,
        backend=options.backend,
        ranks=ranks,
        model_parallel_size=fixed.model_parallel_size,
        pp_size=fixed.pp_size,
        recorder=recorder,
        local=fixed.batch_semantics == "local",
        max_programs=options.max_programs,
        cuda_graphs=options.cuda_graphs,
        static=tuple(options.static),
        outputs=options.outputs,
        rows=StatedRows.of(options.rows, model),
    )
    planner = LivePlanner(
        problem,
        plan,
        fallback=options.fallback and not options.cuda_graphs,
        time_limit_s=options.time_limit_s,
        trials=options.trials,
        recorder=recorder,
        plain=asks_for_plain(),
    )
    hooks = planner.make_plan, planner.make_fallback, planner.make_strategies
    module: DistributedModule = kind(model, parameters, device, of_calls, *hooks)
    may_shard = problem.strategy.zero != 0 or of_calls.model_parallel_size > 1
    # An optimizer made before the first call holds whatever parameters exist now. Replicated
    # DTensors can be sharded in place by the plan that the call makes.
    is_late = plan is None and options.example_inputs is None
    is_late = is_late and (may_shard or bool(problem.strategy.search))
    module.broadcast_parameters(replicated_dtensors=is_late, init_fn=options.init_fn)
    if options.example_inputs is not None:
        module.plan_for(*module.group_arguments(*flattened(options.example_inputs)))
    elif plan is not None:
        module.apply_plan(planner.agreed(plan))
    return module
