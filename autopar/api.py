"""`compile`, `plan` and `verify`, the public entry points.

A model becomes a program in five steps:

1. capture: `autopar.capture` traces a call into a joint graph of forward and backward;
2. measure: `autopar.planner.machine` times collectives and operators;
3. plan: `autopar.planner.search` chooses the fastest plan that fits;
4. transform: `autopar.passes` rewrite the graph as the plan says;
5. emit: `autopar.runtime.codegen` generates Python code from the graph.

`autopar.driver` runs steps 1 to 3; `autopar.runtime` repeats 4 and 5 for every new kind of call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.capture.call import flattened
from autopar.core.common.checks import count, demand, flag, suggests_names
from autopar.core.environment import asks_for_plain
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.memory.optimizer_memory import Optimizer
from autopar.options import (
    CompileOptions,
    MakeOptimizer,
    ReducePrecision,
    check_inputs,
    check_model,
)
from autopar.planner.search.search_progress import ReportProgress
from autopar.runtime.module import DistributedModule
from autopar.runtime.options import MAX_PROGRAMS, Batch, Outputs
from autopar.session.compile_model import compile_model
from autopar.session.plan_model import plan_model
from autopar.train.verification.deviation import Verification
from autopar.train.verification.verify import compare_training, verify_first_call


@suggests_names
def compile(
    model: nn.Module,
    world_size: int | None = None,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    strategy: str | Strategy = "auto",
    memory: int | str | None = None,
    cluster: Cluster | None = None,
    plan: Plan | None = None,
    batch: Batch = "global",
    outputs: Outputs = "whole",
    rows: int | Mapping[str | int, int] | None = None,
    precision: str | torch.dtype | None = None,
    reduce_precision: ReducePrecision | None = None,
    lossy: bool | Sequence[str] = False,
    backend: str = "eager",
    cuda_graphs: bool = False,
    fallback: bool = True,
    timeout_s: float = 300.0,
    time_limit_s: float | None = 60.0,
    trials: int | None = None,
    verify: bool = False,
    device: str | torch.device | None = None,
    init_fn: Callable[[nn.Module], Any] | None = None,
    max_programs: int = MAX_PROGRAMS,
    static: Sequence[str] = (),
) -> DistributedModule:
    """Returns the model, training across all ranks exactly as on one device.

    Inside torchrun this initializes torch.distributed if necessary. All ranks receive the values
    of rank 0. Without `example_inputs` the first call is planned. An optimizer made
    before that holds the right parameters. AUTOPAR_PLAIN=1 in the environment trains the plain
    model instead.

    Args:
        model: module whose forward can be traced, also on the meta device: its values then follow
            block by block (docs/large-models.md). It is modified in place.
        world_size: number of ranks; None for all that are running.
        example_inputs: arguments of a typical call: a tuple, or a dict of keyword arguments.
        loss_fn: loss function inside the graph: a call `model(*inputs, target)` returns
            `loss_fn(model(*inputs), target)`.
        optimizer: class or factory of the training optimizer, for its memory.
        strategy: "auto" for the fastest plan under which torch's gradient utilities stay correct;
            "fastest" to allow pipelines too (clip with `model.clip_grad_norm_`); "ddp", "zero1",
            "zero2", "zero3" (or "fsdp") for data parallelism; or a Strategy.
        memory: cap per rank in bytes, or as a text such as "24GiB", "24GB" or "24G" (24 GiB);
            None for the capacity of the device.
        cluster: measured cluster; None to measure the running ranks once.
        plan: plan to follow.
        batch: "global" if every rank receives the same batch and takes its own rows, "local" if
            each rank brings the same number of its own rows.
        outputs: "whole" if results have all rows of a global batch, "own" for this rank's rows
            alone, a loss of which must be their mean (docs/exactness.md).
        rows: dim of the rows in every tensor, or in the arguments that have rows, by name or
            position: {"x": 1, "y": 0}. None to take dim 0 of the first tensor, and of every other
            with its size; under batch="local" it must then be proven that no other choice trains
            otherwise.
        precision: "bf16" or "fp16" for a forward under autocast, "fp32" for none; None for that of
            `plan`, or none.
        reduce_precision: "bf16" to reduce gradients in bf16, unlike on one device; None for
            the dtype of the parameters.
        lossy: gradient compressions and local steps allowed where they are faster: True for bf16
            and int8, or a list such as ["int8", "diloco(steps=50)"] (docs/slow-links.md).
        backend: "eager", or a backend of torch.compile such as "inductor".
        cuda_graphs: replay forward and backward as CUDA graphs, on GPUs, without pipelines
            and without `fallback` (docs/gpus.md).
        fallback: train under torch's DDP or fully_shard, with a warning, if the model cannot be
            captured.
        timeout_s: timeout of collectives in seconds, if the process group is made here.
        time_limit_s: limit of the search over meshes in seconds; None for none.
        trials: number of top-ranked plans to benchmark on copies of the model, as far as half of
            the free memory allows; None for 6 where the mesh is searched, else none.
        verify: compare the first batch's training steps with the plain model's.
        device: training device; None for that of the parameters.
        init_fn: initialises one module on the meta device; None for `reset_parameters()`.
        max_programs: number of programs to keep, one for each shape and mode of a call; the least
            recently used goes, and is compiled again when needed (docs/troubleshooting.md).
        static: keyword arguments, tensors of integers whose values forward reads in Python, such as
            sizes of images. Each of their values has a program.

    Raises:
        StrategyError: an argument is invalid or contradicts others or the running ranks.
        DisagreementError: ranks have different models, plans or batches.
        PlanError: `plan` is for another model or world.
        OutOfMemoryError: nothing fits under `memory`.
        CaptureError: the model cannot be captured and `fallback` is off.
        VerificationError: the first call does not train as the plain model does.
    """
    options = CompileOptions(
        world_size=world_size,
        example_inputs=example_inputs,
        loss_fn=loss_fn,
        optimizer=optimizer,
        strategy=strategy,
        memory=memory,
        cluster=cluster,
        plan=plan,
        batch=batch,
        outputs=outputs,
        rows=rows,
        precision=precision,
        reduce_precision=reduce_precision,
        lossy=lossy,
        backend=backend,
        cuda_graphs=cuda_graphs,
        fallback=fallback,
        timeout_s=timeout_s,
        time_limit_s=time_limit_s,
        trials=trials,
        verify=verify,
        device=device,
        init_fn=init_fn,
        max_programs=max_programs,
        static=static,
    )
    check_model(model)
    check_inputs(model, options)
    module = compile_model(model, options)
    if verify and not asks_for_plain():
        module._execution.check_first_call = verify_first_call
    return module


@suggests_names
def plan(
    model: nn.Module,
    world_size: int,
    *,
    example_inputs: Any,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    strategy: str | Strategy = "auto",
    memory: int | str | None = None,
    cluster: Cluster | None = None,
    batch: Batch = "global",
    precision: str | torch.dtype | None = None,
    reduce_precision: ReducePrecision | None = None,
    lossy: bool | Sequence[str] = False,
    time_limit_s: float | None = None,
    backend: str = "eager",
    progress: ReportProgress = lambda progress: None,
) -> Plan:
    """Returns the plan for `world_size` ranks, which need not be running.

    The arguments are those of `compile`. The model and inputs may be on the meta device. Without
    `cluster` collectives are modelled, and the plan says so. Without `precision` a cluster with
    tensor cores is planned for bf16 autocast, as the plan notes; "fp32" prices float32. A `backend`
    other than "eager" fuses operators. `progress` is called before every mesh.
    """
    options = CompileOptions(
        world_size=count("world_size", world_size),
        example_inputs=example_inputs,
        loss_fn=loss_fn,
        optimizer=optimizer,
        strategy=strategy,
        memory=memory,
        cluster=cluster,
        batch=batch,
        precision=precision,
        reduce_precision=reduce_precision,
        lossy=lossy,
        time_limit_s=time_limit_s,
        backend=backend,
    )
    check_model(model)
    check_inputs(model, options, required=True)
    demand(callable(progress), "progress", progress, "give a function")
    return plan_model(model, options, progress)


def verify(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    example_inputs: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Optimizer | None = None,
    steps: int = 3,
    double: bool = True,
    tolerance: float | None = None,
    **options: Any,
) -> Verification:
    """Trains under a plan and plainly for some steps, and compares both.

    Every step compares the loss, all gradients, and all parameters and buffers after the
    optimizer's step. Rank 0 prints the verdict. All ranks call this at once, with the arguments of
    a call of the compiled model. The model, the optimizer and random states do not change. Random
    operators yield constants meanwhile (`Verification.draws` names them).

    Args:
        model: the model; both sides train copies with the values of rank 0.
        plan: plan for the running ranks; None for the one that `compile` chooses.
        example_inputs: tuple of arguments or dict of keyword arguments, the same on every rank
            under batch="global", the rank's own rows under batch="local".
        loss: extracts the loss from the model's result. The default is the result, its `loss`, its
            first scalar, or the mean square of all results.
        optimizer: class, factory, or an optimizer whose class and options are used; by default
            SGD with momentum 0.9 and a learning rate of 1e-2.
        steps: number of steps on the same batch.
        double: train in float64, where both sides differ only in the order of summation.
        tolerance: relative difference that passes; by default 1e-9 in float64, 1e-5 in float32,
            1e-2 in float16 and 5e-2 in bfloat16, for the plain model's least precise dtype.
        options: further arguments of `compile`.

    Raises:
        StrategyError: an argument is invalid, `example_inputs` have no values, the model returns
            nothing to train, or it draws random numbers in code compiled by a backend.
    """
    check_model(model)
    demand(loss is None or callable(loss), "loss", loss, "give a function")
    count("steps", steps)
    flag("double", double)
    if optimizer is not None:
        is_made = isinstance(optimizer, torch.optim.Optimizer)
        options["optimizer"] = type(optimizer) if is_made else optimizer
    chosen = CompileOptions(plan=plan, example_inputs=example_inputs, **options)
    check_inputs(model, chosen, required=True)
    call = flattened(example_inputs)
    return compare_training(model, call, chosen, loss, optimizer, steps, double, tolerance)
