"""`compile` and `plan`: from a model to what runs, in five steps.

A call of the model is captured into a joint graph (`capture`); collectives and operators are
measured (`measure`); the planner chooses (`plan`); passes write the choice into the graph
(`transform`); Python code is generated from it (`emit`). The last two happen for every new kind
of call, under the same plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from autopar.arguments import check, memory_of, precision_of
from autopar.autotune.autotune import benchmark_and_pick, num_plans_to_benchmark, plans_to_benchmark
from autopar.capture.batch_shards import last_part
from autopar.capture.model_info import describe_buffers, describe_parameters, device_of, total_bytes
from autopar.capture.offline import Known, capture_of_rank, flattened
from autopar.common.notices import warn_once
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.measurement.measure import measure
from autopar.errors import CaptureError, FallbackWarning, LossyWarning
from autopar.ir.graph import TrainingGraph
from autopar.ir.mesh_levels import DATA_AXIS
from autopar.passes.registration import DISABLE, pass_settings
from autopar.plan.partition import NodeStrategies, Partition
from autopar.plan.spec import fingerprint
from autopar.plan.strategy import Strategy
from autopar.planner.deadline import Deadline
from autopar.planner.machine import Machine, ranks_of
from autopar.planner.placement.unmeasured import repartition
from autopar.planner.search.estimate_captures import MeshEstimator
from autopar.planner.search.fixed_mesh import (
    Graphs,
    PlanningProblem,
    measured,
    plan_fixed_mesh,
    provisional_strategies,
)
from autopar.planner.search.mesh_search import ReportProgress, deadline_per_mesh, fastest_mesh
from autopar.planner.search.oom_advice import memoize_by_strategy, on_more_ranks, plan_or_advise
from autopar.planner.search.pipeline_search import captured_at
from autopar.profiler.profiler import Profiler, profiler
from autopar.report.plan import Plan
from autopar.report.table import compressed
from autopar.runtime.agreement.captured_graph import agree_on_graph, versions
from autopar.runtime.agreement.consensus import (
    assert_same_across_ranks,
    broadcast_from_rank0,
    run_on_all_ranks,
)
from autopar.runtime.attributes import check_not_compiled
from autopar.runtime.fallback import describe_fallback_differences, wrap_with_ddp_or_fsdp
from autopar.runtime.module import CaptureFunction, DistributedModule
from autopar.runtime.options import Options
from autopar.runtime.parameters.distribute import check_plain, make_contiguous, materialize
from autopar.runtime.process_groups import backend_of, ensure_process_group, make_mesh

Batch = Literal["global", "local"]
Optimizer = Callable[..., torch.optim.Optimizer]
MEASURING_S = 15.0
"""For the collectives of every mesh, where the mesh is searched."""


def compile(
    model: nn.Module,
    world_size: int | None = None,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Optimizer = torch.optim.AdamW,
    strategy: str | Strategy = "auto",
    memory: int | str | None = None,
    cluster: Cluster | None = None,
    plan: Plan | None = None,
    batch: Batch = "global",
    precision: str | torch.dtype | None = None,
    lossy: bool | Sequence[str] = False,
    backend: str = "eager",
    fallback: bool = True,
    timeout_s: float = 300.0,
    time_limit_s: float | None = 60.0,
    trials: int | None = None,
    verify: bool = False,
) -> DistributedModule:
    """The model, training across all ranks, exactly as it would on one device.

    Inside torchrun this initialises torch.distributed if nobody has. Every rank gets the
    parameters of rank 0. Without `example_inputs` the plan is made at the first call, and an
    optimizer made before that holds the right parameters.

    Args:
        model: any model whose forward can be traced; on the device that it trains on, or on the
            meta device with `reset_parameters` in its modules. It is taken over, not copied.
        world_size: number of ranks; None for as many as are running.
        example_inputs: arguments of a typical call: a tuple, or a dict of keyword arguments.
        loss_fn: if given, a call `model(*inputs, target)` returns `loss_fn(model(*inputs),
            target)`.
        optimizer: class or factory of the optimizer that will be used, for its memory.
        strategy: "auto" for the fastest under which torch's own functions for gradients stay
            right; "fastest" for that of pipelines too (then clip by `model.clip_grad_norm_`);
            "ddp", "zero1", "zero2", "zero3" (or "fsdp"), all data parallel; or a Strategy.
        memory: cap per rank, in bytes or as a text such as "24GiB", "24GB" or "24G", which is
            24 GiB; None for what the device has.
        cluster: measured elsewhere; None measures the ranks that are running, once.
        plan: a plan made before, which is then followed.
        batch: "global": every rank is given the same batch and takes its own rows. "local": each
            rank brings as many rows of its own.
        precision: "bf16" or "fp16" runs the forward under autocast.
        lossy: whether gradients may be compressed where that is faster: True for bf16 and int8, or
            a list of methods such as ["int8", "powersgd(rank=4)"]. The plan says where it is done.
        backend: "eager", or a backend of torch.compile such as "inductor".
        fallback: train under torch's DDP or fully_shard, with a warning, if the model cannot be
            captured; otherwise raise.
        timeout_s: seconds after which a collective fails, if the process group is made here.
        time_limit_s: seconds after which no further mesh is looked at; None for no limit.
        trials: number of top-ranked plans to run for some steps, on copies of the model, as far as
            half of the free memory allows; None for 6 where the mesh is searched, else none.
        verify: hold steps on the first batch against the plain model's first (`autopar.verify`).

    Raises:
        StrategyError: an argument that makes no sense, or contradicts others or what is running.
        DisagreementError: ranks with different models, plans or batches.
        PlanError: `plan` is for another model or world.
        OutOfMemoryError: nothing fits under `memory`.
        CaptureError: the model cannot be captured and `fallback` is off.
        VerificationError: the first call does not train as the plain model does.
    """
    check(
        model=model,
        world_size=world_size,
        example_inputs=example_inputs,
        loss_fn=loss_fn,
        optimizer=optimizer,
        strategy=strategy,
        memory=memory,
        cluster=cluster,
        plan=plan,
        batch=batch,
        precision=precision,
        lossy=lossy,
        backend=backend,
        fallback=fallback,
        timeout_s=timeout_s,
        time_limit_s=time_limit_s,
        trials=trials,
        verify=verify,
    )
    ranks = ensure_process_group(world_size, timeout_s)
    check_not_compiled(model)
    check_plain(model)
    device = device_of(model)
    materialize(model, device)
    make_contiguous(model)
    parameters = describe_parameters(model)
    ours = (fingerprint(parameters.values()), describe_buffers(model))
    assert_same_across_ranks(versions(), "Install the same versions on every rank.")
    assert_same_across_ranks({"model": ours}, "Build the same model on every rank.")
    assert_same_across_ranks(
        {"set of passes": pass_settings()},
        f"Set {DISABLE} and register passes alike on every rank.",
    )
    recorder = profiler(optimizer, device)
    chosen = _strategy(strategy, batch, lossy)
    given = plan if plan is not None else chosen
    options = Options(
        batch,
        loss_fn,
        precision_of(precision),
        backend,
        ranks,
        given.model_parallel_size,
        given.pp_size,
        recorder,
        local=given.batch_semantics == "local",
    )
    problem = PlanningProblem(
        model=type(model).__name__,
        parameters=parameters,
        world_size=ranks,
        strategy=chosen,
        memory=memory_of(memory),
        batch=batch,
        precision=str(options.precision)[6:] if options.precision else None,
        optimizer=optimizer,
        cluster=cluster,
        device=device,
        comm_backend=backend_of(device),
        live=True,
    )
    alike = {
        "batch mode": batch,  # on which the strategy depends
        "strategy": problem.strategy,
        "precision": problem.precision,
        "backend": backend,
        "memory cap": problem.memory,
        "verification": verify,
        "optimizer": problem.base().optimizer,
        "idea of what is given (example_inputs, loss_fn, cluster, plan)": [
            given is not None for given in (example_inputs, loss_fn, cluster, plan)
        ],
    }
    assert_same_across_ranks(alike, "Call autopar.compile alike on every rank.")
    if plan is not None:
        run_on_all_ranks(lambda: plan.check(model, parameters.values(), ranks))

    def make_plan(captured: CaptureFunction, call: Any) -> Plan:
        chosen = plan
        if chosen is None:
            count = num_plans_to_benchmark(trials, problem)
            plans = _choose(problem, captured, time_limit_s, recorder, count)
            chosen = benchmark_and_pick(module, plans, call, optimizer)
        assert_same_across_ranks({"plan": chosen.digest()}, "Give every rank the same plan.")
        for line in compressed(chosen):
            warn_once(LossyWarning, f"under autopar's plan {line}")
        if recorder is not None:
            recorder.plan = chosen
        return chosen

    def make_fallback(inner: nn.Module, reason: CaptureError) -> nn.Module:
        if not fallback:
            raise reason
        return _fall_back(inner, problem, reason)

    def make_strategies(graph: TrainingGraph, partition: Partition) -> NodeStrategies:
        return broadcast_from_rank0(lambda: repartition(graph, partition))

    module = DistributedModule(
        model, parameters, device, options, make_plan, make_fallback, make_strategies
    )
    sharded = chosen.zero != 0 or options.model_parallel_size > 1 or bool(chosen.search)
    late = plan is None and example_inputs is None and sharded
    module.broadcast_parameters(replicated_dtensors=late)
    if example_inputs is not None:
        module.plan_for(*flattened(example_inputs))
    elif plan is not None:
        module.apply_plan(make_plan(lambda *_: None, None))  # type: ignore[arg-type]
    if verify:
        from autopar.verification.verify import verify_first_call  # imports this module

        module.before_first_training_call = verify_first_call
    return module


def plan(
    model: nn.Module,
    world_size: int,
    *,
    example_inputs: Any,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Optimizer = torch.optim.AdamW,
    strategy: str | Strategy = "auto",
    memory: int | str | None = None,
    cluster: Cluster | None = None,
    batch: Batch = "global",
    precision: str | torch.dtype | None = None,
    lossy: bool | Sequence[str] = False,
    time_limit_s: float | None = None,
    backend: str = "eager",
    progress: ReportProgress = lambda looked: None,
) -> Plan:
    """The plan for `world_size` ranks that need not be running; needs no process group.

    The arguments are those of `compile`; the model and inputs may be on the meta device. Without
    `cluster` the collectives are modelled, and the plan says so. With another `backend` than
    "eager" operators that a compiler fuses are priced so. `progress` is told of every mesh.
    """
    check(
        "world_size",
        "example_inputs",
        model=model,
        world_size=world_size,
        example_inputs=example_inputs,
        loss_fn=loss_fn,
        optimizer=optimizer,
        strategy=strategy,
        memory=memory,
        cluster=cluster,
        batch=batch,
        precision=precision,
        lossy=lossy,
        time_limit_s=time_limit_s,
        backend=backend,
        progress=progress,
    )
    check_not_compiled(model)
    device = device_of(model)
    autocast = precision_of(precision)
    problem = PlanningProblem(
        model=type(model).__name__,
        parameters=describe_parameters(model),
        world_size=world_size,
        strategy=_strategy(strategy, batch, lossy),
        memory=memory_of(memory),
        batch=batch,
        precision=str(autocast)[6:] if autocast else None,
        optimizer=optimizer,
        cluster=cluster or Cluster.default(world_size, device.type),
        device=device,
        comm_backend=cluster.backend if cluster else ("gloo" if device.type == "cpu" else "nccl"),
        live=False,
        backend=backend,
    )

    in_time = Deadline(time_limit_s)

    def asking(given: Any) -> Callable[[PlanningProblem], Plan]:
        attempts: Known = {}
        local = problem.strategy.batch_semantics == "local"

        @functools.cache
        def captured(ranks: int, micro_batches: int) -> TrainingGraph:
            own = model, given, 0, ranks, batch, autocast, loss_fn, micro_batches
            return capture_of_rank(*own, known=attempts, local=local)

        @memoize_by_strategy
        def prepared(own: PlanningProblem) -> tuple[Graphs, Machine | None]:
            graphs = captured_at(own.strategy, functools.partial(captured, own.dp_size))
            return graphs, measured(own, graphs)

        def look(own: PlanningProblem) -> Plan:
            ready = prepared(own)
            return plan_fixed_mesh(
                replace(own, deadline=deadline_per_mesh(problem, in_time)), *ready
            )

        def slice_of(slices: int, known: Known) -> TrainingGraph:
            own = model, given, 0, slices, batch, autocast, loss_fn
            return capture_of_rank(*own, known=known, local=local, in_time=slices > 1)

        def answer(own: PlanningProblem) -> Plan:
            assert own.cluster is not None
            sketch, near = MeshEstimator(own, slice_of, model), own.cluster.ranks_per_node
            return fastest_mesh(own, look, sketch, near, in_time, progress)

        return answer

    answer = asking(example_inputs)

    def elsewhere(times: int, parts: int) -> Plan:
        given = answer if parts == 1 else asking(last_part(example_inputs, parts))
        return given(on_more_ranks(problem, times))

    return plan_or_advise(problem, answer, elsewhere)


def _choose(
    problem: PlanningProblem,
    captured: CaptureFunction,
    time_limit_s: float | None,
    recorder: Profiler | None = None,
    trials: int = 0,
) -> list[Plan]:
    """Captures, measures and plans; one rank decides, all follow.

    Returns:
        The plan, and behind it those that are worth a trial, if any are wanted.
    """
    if trials > 1:
        problem = replace(problem, autotune_candidates=[])

    @memoize_by_strategy
    def prepared(own: PlanningProblem) -> tuple[Graphs, Machine | None]:
        at = own.strategy.model_parallel_size, own.strategy.pp_size
        graphs = run_on_all_ranks(
            lambda: captured_at(own.strategy, lambda n: captured(*at, n).graph)
        )
        agree_on_graph(next(iter(graphs.values())), even=False)
        if recorder is not None:
            recorder.asked.append((own, graphs))
        drafts = broadcast_from_rank0(lambda: provisional_strategies(own, graphs))
        return graphs, run_on_all_ranks(lambda: measured(own, graphs, drafts))

    def look(own: PlanningProblem) -> Plan:
        ready = prepared(own)
        timed = replace(own, deadline=deadline_per_mesh(problem, in_time))
        return broadcast_from_rank0(lambda: plan_fixed_mesh(timed, *ready))

    def answer(own: PlanningProblem) -> Plan:
        if not own.strategy.search:
            return look(own)
        own = replace(own, cluster=own.cluster or measure(budget_s=MEASURING_S))
        assert own.cluster is not None
        sharing = (
            run_on_all_ranks(lambda: ranks_of(live=True).sharing) if own.device.type == "cpu" else 1
        )
        sketch = MeshEstimator(
            own, lambda n, _: captured(own.world_size, 1, n).graph, sharing=sharing
        )
        return fastest_mesh(
            own,
            look,
            lambda each: broadcast_from_rank0(lambda: sketch(each)),
            own.cluster.ranks_per_node,
            lambda: broadcast_from_rank0(in_time),
        )

    in_time = Deadline(time_limit_s)
    return plans_to_benchmark(problem, plan_or_advise(problem, answer), trials)


def _fall_back(model: nn.Module, problem: PlanningProblem, reason: CaptureError) -> nn.Module:
    """Torch's own DDP, or fully_shard where whole states exceed the cap."""
    ranks = problem.world_size
    if ranks == 1:
        warn_once(FallbackWarning, f"autopar runs the model as it is, in plain PyTorch: {reason}")
        return model
    copies = 2 + problem.base().optimizer_state_ratio
    needed = total_bytes(problem.parameters.values()) * copies
    fixed = problem.strategy.zero
    shard = bool(fixed) if fixed is not None else problem.memory is not None
    shard = shard and (fixed is not None or needed > (problem.memory or needed))
    name = "fully_shard" if shard else "DistributedDataParallel"
    wanted = problem.strategy.model_parallel_size * problem.strategy.pp_size
    undivided = " and does not divide the model" if wanted > 1 else ""
    warn_once(
        FallbackWarning,
        f"autopar trains with torch's {name} instead{undivided}: {reason}\n"
        f"{describe_fallback_differences(model)}",
    )
    mesh = make_mesh(problem.device, ((DATA_AXIS, ranks),))
    assert mesh is not None
    return wrap_with_ddp_or_fsdp(model, mesh, shard=shard)


def _strategy(given: str | Strategy, batch: str, lossy: bool | Sequence[str]) -> Strategy:
    """What is fixed; ranks that bring their own rows are not to share a model unasked."""
    strategy = Strategy.of(given).allowing(lossy)
    return replace(strategy, search=()) if batch == "local" else strategy
